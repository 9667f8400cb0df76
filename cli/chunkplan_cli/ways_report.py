"""Prints ways to train as rows that can come one by one: those of today, and that of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.control import Control
from rich.padding import Padding
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from chunkplan.cost.hardware import ERRORS, source_of

if TYPE_CHECKING:
    from chunkplan.tuning.baselines import Baseline
    from chunkplan.tuning.grid import Choice
    from chunkplan.tuning.options import TuneOptions

#: Characters of the columns beside the name of a way.
_WIDTHS = {"step": 9, "tokens/s": 12, "GPU-hours": 10, "lost": 7}

#: Of a bar of progress, which is drawn again below the row.
_ERASE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


def print_way_heads(console: Console, title: str, options: TuneOptions) -> None:
    """Print what stands above the rows, and how far off their times may be."""
    source = source_of(options.hardware)
    words = f"predicted, good to about {ERRORS[source]:.0%} ({options.hardware.name}: {source}); GPU-hours: of an epoch"
    console.print(Text(title, style="bold"))
    console.print(Text(words, style="dim"))
    console.print(_row("way", tuple(_WIDTHS), "dim"))


def print_way(console: Console, way: Baseline | Choice, options: TuneOptions, num_sequences: int) -> None:
    """Print a way of today, or a choice, in two lines: what it takes, and how it is run or why it does not fit."""
    from chunkplan.reporting.way_row import way_row
    from chunkplan.tuning.baselines import Baseline
    from chunkplan.tuning.document import baseline_entry, choice_entry

    entry = baseline_entry(way) if isinstance(way, Baseline) else choice_entry(way)
    name, *cells, memory, (layout, *how) = way_row(entry, options.global_batch, num_sequences)
    notes = [layout, memory if way.fits else f"does not fit: {memory}", *how]
    row = _row(name, cells, "" if way.fits else "dim")
    below = Padding(Text(", ".join(notes), style="dim"), (0, 0, 0, 2), expand=False)
    console.print(Group(*([_ERASE] if console.is_terminal else []), row, below))


def _row(name: str, cells: Sequence[str], style: str) -> Table:
    grid = Table.grid()
    grid.add_column(width=41)
    for width in _WIDTHS.values():
        grid.add_column(width=width, justify="right", no_wrap=True)
    grid.add_row(name, *cells, style=style)
    return grid
