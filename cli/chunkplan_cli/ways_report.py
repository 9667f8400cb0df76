"""Prints ways to train as rows that can come one by one: those of today, and that of a plan."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.control import Control
from rich.padding import Padding
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from chunkplan.cost.checkpointing import checkpointing_words
from chunkplan.cost.hardware import ERRORS, source_of
from chunkplan.quantities import ZERO, gibibytes, percent, seconds

if TYPE_CHECKING:
    from chunkplan.tuning.baselines import Baseline
    from chunkplan.tuning.grid import Choice
    from chunkplan.tuning.options import TuneOptions

#: Characters of the columns beside the name of a way.
_WIDTHS = {"step": 9, "tokens/s": 9, "GPU-hours": 10, "lost": 7}

#: Of a bar of progress, which is drawn again below the row.
_ERASE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))

_FULL = "full activation checkpointing"


def print_way_heads(console: Console, title: str, options: TuneOptions) -> None:
    """Print what stands above the rows, and how far off their times may be."""
    source = source_of(options.hardware)
    words = f"times within {ERRORS[source]:.0%}, GPU-hours of an epoch: the profile of the {options.hardware.name} is "
    words += {"measured": "fitted to measurements", "data sheet": "from its data sheet and published figures"}.get(
        source, source
    )
    console.print(Text(title, style="bold"))
    console.print(Text(f"{words}; GPU memory {gibibytes(options.gpu_memory)}", style="dim"))
    console.print(_row("way", tuple(_WIDTHS), "dim"))


def print_way(console: Console, way: Baseline | Choice, options: TuneOptions, num_sequences: int) -> None:
    """Print a way of today, or a choice, in two lines: what it takes, and how it is run or why it does not fit."""
    name, checkpointing, sharding, lost = _how(way)
    hours = -(-num_sequences // options.global_batch) * way.step_ns / 3.6e12 * way.layout.gpus
    if way.fits:
        cells = (seconds(way.step_ns / 1e3), f"{way.tokens_per_second:,.0f}", f"{hours:,.3g}")
        notes = [f"{gibibytes(way.memory.total)} a GPU", *checkpointing_words(checkpointing, _FULL)]
        notes += [ZERO[sharding]] if sharding != "optimizer" and way.layout.dp > 1 else []
    else:
        cells = ("no fit", "", "")
        parts = asdict(way.memory)
        most = max(parts, key=lambda part: parts[part])
        what = f"{gibibytes(parts[most])} of it {most.replace('_', ' ').replace('kv', 'KV')}"
        notes = [f"does not fit: {gibibytes(way.memory.total)} a GPU at least, {what}"]
    dp, tp, pp = way.layout
    layout = ", ".join(f"{axis} {size}" for axis, size in (("dp", dp), ("tp", tp), ("pp", pp)) if size > 1)
    notes = [layout or "one GPU", *notes]
    row = _row(name, (*cells, percent(lost) if lost else "none"), "" if way.fits else "dim")
    below = Padding(Text(", ".join(notes), style="dim"), (0, 0, 0, 2), expand=False)
    console.print(Group(*([_ERASE] if console.is_terminal else []), row, below))


def _how(way: Baseline | Choice) -> tuple[str, str, str, float]:
    """Name of a way, its activation checkpointing and sharding, and the share of the tokens that it loses."""
    from chunkplan.tuning.baselines import Baseline

    if isinstance(way, Baseline):
        return way.name, way.checkpointing, way.sharding, way.lost
    return "chunkplan", way.cost.checkpointing, way.cost.sharding, 0.0


def _row(name: str, cells: tuple[str, ...], style: str) -> Table:
    grid = Table.grid()
    grid.add_column(width=42)
    for width in _WIDTHS.values():
        grid.add_column(width=width, justify="right", no_wrap=True)
    grid.add_row(name, *cells, style=style)
    return grid
