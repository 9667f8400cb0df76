"""Parts of a page: sections with words, charts and tables, and the colours and layout that all charts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import plotly.graph_objects as go

from chunkplan.reporting.tables import Table

# Colours and the layout that all charts share. What depends on light or dark, the page sets when it draws.


#: Entries of a layout, an axis or a marker by the names that plotly has for them; what they may be, plotly checks.
PlotlyEntries = dict[str, Any]

#: People who see fewer colours can distinguish them, on light and dark grounds alike; white text on them can be read.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#1f74b5", "#b45309", "#0f7b5a", "#8e56a8", "#6b7684"

#: Colour of lost time.
RED = "#c02626"

#: Colour of the critical path.
PINK = "#d6338a"

#: Pixels of text in charts.
FONT_SIZE = 12


def layout(height: int, **more: Any) -> PlotlyEntries:
    """Make the layout of a chart as wide as its place and `height` pixels high, with `more` entries of plotly's."""
    return dict(
        height=height,
        autosize=True,
        template="none",
        font={"family": "system-ui, sans-serif", "size": FONT_SIZE},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 8, "r": 8, "t": 36, "b": 8},
        legend={
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yanchor": "bottom",
            "tracegroupgap": 0,
            "traceorder": "normal",
            "maxheight": 1,  # of the chart: the page makes room for all lines
        },
        hoverlabel={"align": "left"},
        **more,
    )


def axis(title: str, **more: Any) -> PlotlyEntries:
    """Make an axis with a title of plain text."""
    title_text = {"text": plain(title), "standoff": 8}
    return {"title": title_text, "automargin": True, "zeroline": False, "separatethousands": True, **more}


def narrowest(width: float, **more: Any) -> PlotlyEntries:
    """Make entries of a layout of which the page's buttons never show less than `width` of the x axis; it finds `more`
    there."""
    return {"meta": {"narrowest": width, **more}}


def within(least: float, most: float) -> PlotlyEntries:
    """Make entries of an axis that shows all from `least` to `most`, and that nobody can move or zoom out of it."""
    return {"range": [least, most], "minallowed": least, "maxallowed": most}


def plain(text: str) -> str:
    """Escape text, so that plotly shows it as it is: it takes some tags for markup."""
    return escape(text, quote=False)


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
class MarkedText:
    """Text of a sequence under a caption, in runs of one kind each.

    A kind is "" for plain text, "special", "target", "special target", or "note" for the page's notes on the text.
    """

    caption: str
    runs: Sequence[tuple[str, str]] = field(repr=False)


@dataclass(frozen=True)
class Drawer:
    """Content that opens on demand, by its caption or by the element with the id `name`."""

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
    these open when asked for, unless the section `is_open`."""

    name: str
    title: str
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    texts: Sequence[MarkedText] = ()
    drawers: Sequence[Drawers] = ()
    is_open: bool = False
