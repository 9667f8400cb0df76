"""What a page is made of: sections with words, charts and tables. All words are plain text, escaped when rendered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import plotly.graph_objects as go


@dataclass(frozen=True)
class Chart:
    """One drawing, or several of one kind to choose from.

    `name` is its id; `words` say what it shows to those who cannot see it. `figures` by label: of several, the page
    draws the first, until another is chosen.
    """

    name: str
    words: str
    figures: dict[str, go.Figure] = field(repr=False)
    zooms: bool = False


@dataclass(frozen=True)
class Table:
    """Numbers under a caption. The first cell of a row heads it; columns named in `texts` are words, not numbers."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]] = field(repr=False)
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class MarkedText:
    """What a sequence says, under a caption: runs of text, each with what it is.

    That is "" for plain text, "special", "target", "special target", or "note" for words of the page about the text.
    """

    caption: str
    runs: Sequence[tuple[str, str]] = field(repr=False)


@dataclass(frozen=True)
class Drawer:
    """What opens when somebody asks for it, by its caption or by what has its `name`, which is its id."""

    name: str
    caption: str
    notes: Sequence[str] = ()
    texts: Sequence[MarkedText] = field(default=(), repr=False)


@dataclass(frozen=True)
class Drawers:
    """Drawers that belong to the figure `label` of `chart`, and are there while that is drawn."""

    chart: str
    label: str
    caption: str
    notes: Sequence[str]
    drawers: Sequence[Drawer] = field(repr=False)


@dataclass(frozen=True)
class Section:
    """A heading, warnings and notes (a paragraph each), charts, drawers of these, texts, then tables: beside charts
    these open when asked for."""

    name: str
    title: str
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    texts: Sequence[MarkedText] = ()
    drawers: Sequence[Drawers] = ()
