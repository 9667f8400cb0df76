"""The terminal: stdout is data, stderr is everything else; readable without colour and at 80 columns."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from chunkplan.errors import ChunkplanError, harmless, one_line
from chunkplan.errors import visible as without_controls

if TYPE_CHECKING:
    from chunkplan.reporting import tables as reporting

#: Most characters of a bar in a table.
_MAX_BAR = 20


def facts_grid(facts: Iterable[tuple[str, str]], bold: Collection[str] = ()) -> Table:
    """Lay out facts below each other, each behind its name; those of the names in `bold` stand out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, words in facts:
        grid.add_row(name, Text(words, style="bold" if name in bold else ""))
    return grid


def _bar(console: Console, value: float, most: float, width: int) -> str:
    """Draw a bar, of which `width` characters stand for `most`; a little is never nothing."""
    block = "#" if console.options.ascii_only else "█"
    return block * (max(1, round(width * value / most)) if value else 0)


def drawn_table(console: Console, table: reporting.Table, gap: int = 2) -> Table:
    """Draw a table of a report, its columns `gap` apart: words are folded, numbers are not, bars take what room is
    left."""
    drawn = Table(box=None, padding=(0, gap, 0, 0), header_style="dim", show_header=any(table.head))
    if table.caption:
        drawn.title, drawn.title_justify = Text(table.caption, style="bold"), "left"
        drawn.min_width = min(len(table.caption), console.width)
    for name in table.head:
        is_words = name in table.texts
        drawn.add_column(name, justify="left" if is_words else "right", no_wrap=not is_words, overflow="fold")
        if name in table.bars:
            drawn.add_column("")
    columns = zip(table.head, *table.rows, strict=True)
    taken = sum(max(map(len, column)) + gap for column in columns) + gap * len(table.bars)
    room = max(1, min(_MAX_BAR, (console.width - taken) // max(len(table.bars), 1)))
    styles = table.styles or [""] * len(table.rows)
    for number, (row, style) in enumerate(zip(table.rows, styles, strict=True)):
        cells: list[Text] = []
        for name, cell in zip(table.head, row, strict=True):
            cells.append(Text(visible(cell, console)))
            if bars := table.bars.get(name):
                cells.append(Text(_bar(console, bars[number], max(bars), room)))
        drawn.add_row(*cells, style=style)
    return drawn


#: Around runs of target tokens.
MARKS = ("⟦", "⟧")
_ASCII_MARKS = ("[[", "]]")


class _SafeConsole(Console):
    """Shows controls in names and messages from elsewhere as question marks; those of its own styles come later."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)


class _Stdout(_SafeConsole):
    def on_broken_pipe(self) -> None:
        """The reader of a pipe has enough: `main` ends the command as done, where rich would call it an error."""
        raise BrokenPipeError


def stdout() -> Console:
    """Return the console for what was asked for, made when used, so that a test or a pipe may replace sys.stdout."""
    return _Stdout(file=sys.stdout, highlight=False)


def stderr() -> Console:
    """Return the console for progress, notes and errors."""
    return _SafeConsole(file=sys.stderr, highlight=False)


def print_json(document: Any) -> None:
    """Print one JSON document to stdout, plain whatever the terminal."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def note(*lines: str) -> None:
    """Print lines to stderr."""
    for line in lines:
        stderr().print(Text(one_line(line)), soft_wrap=True)


def warn(message: str) -> None:
    """Print a warning to stderr."""
    stderr().print(Text.assemble(("warning: ", "bold yellow"), one_line(message)), soft_wrap=True)


def print_error(error: ChunkplanError) -> None:
    """Print `error: where: what` and, below it, a line for each of several things, and `hint: what to do`."""
    stderr().print(Text.assemble(("error: ", "bold red"), one_line(error.headline)), soft_wrap=True)
    note(*(f"  {line}" for line in error.lines))
    stderr().print(Text.assemble(("hint: ", "bold cyan"), one_line(error.hint)), soft_wrap=True)


def marks(console: Console) -> tuple[str, str]:
    """Return what stands before and behind a run of target tokens."""
    return _ASCII_MARKS if console.options.ascii_only else MARKS


def visible(text: str, console: Console) -> str:
    """Return `text` as `chunkplan.errors` has it, and codes for `MARKS` and for what the terminal cannot print."""
    shown = without_controls(text, marks=MARKS)
    return shown.encode("ascii", "backslashreplace").decode() if console.options.ascii_only else shown
