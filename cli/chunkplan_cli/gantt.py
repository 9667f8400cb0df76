"""Gantt chart of stages in characters: all is in the characters, colour only helps to see it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from chunkplan.operations import OPS
from chunkplan.reporting.gantt import OP_WORDS, Bar, bars_of
from chunkplan.schedule.timeline import Simulation
from chunkplan.schedule.trace import LETTERS

#: By op, in the order of `OPS`.
_COLOURS = ("bright_blue", "cyan", "yellow", "green", "green", "magenta")

#: Character of a column without a bar.
_IDLE, _WAITS_FOR_RANKS = ".", ":"

#: Long schedules of few stages are shown in several bands, one below the other, of so many lines in all.
_MAX_LINES = 18
#: An action that is this wide can be distinguished from its neighbours and says which chunk it is with.
_WIDE = 5

#: Prints a time, given in the unit of the simulation.
Say = Callable[[float], str]


def print_gantt(console: Console, simulation: Simulation, say: Say) -> None:
    """Print a line a stage, time scaled to the width of the console, and what the letters mean."""
    width = max(console.width - len(_label(0, simulation.pp)), 10)
    makespan = int(simulation.ends.max())
    num_bands = _num_bands(simulation, width)
    rows = bars_of({simulation.rank: simulation})
    for band in range(num_bands):
        start, stop = band * makespan // num_bands, (band + 1) * makespan // num_bands
        for stage, row in enumerate(rows):
            line = _line(row, start, max(stop, start + 1), width, with_virtual_stage=simulation.virtual_stages > 1)
            console.print(Text.assemble((_label(stage, simulation.pp), "dim"), line), no_wrap=True, soft_wrap=True)
        axis = _axis(simulation, start, stop, width, say)
        console.print(Text(" " * len(_label(0, simulation.pp)) + axis, style="dim"), soft_wrap=True)
    for line in _legend(simulation):
        console.print(line)


def _label(stage: int, pp: int) -> str:
    return f"stage {stage:<{len(str(pp - 1))}} "


def _num_bands(simulation: Simulation, width: int) -> int:
    wanted = math.ceil(_WIDE * simulation.ends.size / simulation.pp / width)
    return max(1, min(wanted, _MAX_LINES // (simulation.pp + 1)))


def _line(row: Sequence[Bar], start: int, stop: int, width: int, *, with_virtual_stage: bool) -> Text:
    """Draw what a stage does from `start` to `stop`: a label and a line for each action, dots where it waits.

    Where it waits for ranks that share a chunk, they are colons. A number is there as a whole or not at all, and never
    touches the letter of the next action.
    """
    text = Text()
    winners = _winners(row, start, stop, width)
    column = 0
    while column < width:
        shown, first = winners[column], column
        while column < width and winners[column] is shown:
            column += 1
        if isinstance(shown, str):
            text.append(shown * (column - first), style="dim")
            continue
        labels = shown.labels(with_virtual_stage=with_virtual_stage)
        label = next((each for each in reversed(labels) if len(each) < column - first), labels[0])
        filled = label.ljust(column - first, "=" if shown.is_critical else "-")
        text.append(filled, style=f"black on {_COLOURS[shown.op]}")
    return text


def _winners(row: Sequence[Bar], start: int, stop: int, width: int) -> list[Bar | str]:
    """Choose the bar that each column shows, or `_IDLE` or `_WAITS_FOR_RANKS`.

    Where a column is many bars, it shows what has been shown least so far for the time it takes, so that any stretch of
    columns shows ops and waiting in proportion; of the bars of an op, the longest.
    """
    span = stop - start  # columns are as long as `span` when time is multiplied by `width`
    for_ranks, idle = len(OPS), len(OPS) + 1
    time = [[0] * (for_ranks + 1) for _ in range(width)]
    longest: list[list[tuple[int, int, Bar | str]]] = [[(0, -1, _IDLE)] * (for_ranks + 1) for _ in range(width)]

    def add(what: int, first: int, last: int, place: int, shown: Bar | str) -> None:
        begins, ends = (max(first, start) - start) * width, (min(last, stop) - start) * width
        for column in range(begins // span, -(-ends // span) if ends > begins else 0):
            overlap = min(ends, (column + 1) * span) - max(begins, column * span)
            time[column][what] += overlap
            longest[column][what] = max(longest[column][what], (overlap, place, shown), key=lambda each: each[:2])

    for place, bar in enumerate(row):
        add(bar.op, bar.start, bar.end, place, bar)
        add(for_ranks, bar.start - bar.wait, bar.start, 0, _WAITS_FOR_RANKS)
    winners: list[Bar | str] = []
    owed = [0] * (idle + 1)  # by op, then waiting for ranks, then for all else
    for column in range(width):
        shares = [*time[column], span - sum(time[column])]
        owed = [debt + share for debt, share in zip(owed, shares, strict=True)]
        winner = max((what for what, share in enumerate(shares) if share), key=lambda what: owed[what])
        owed[winner] -= span
        winners.append(_IDLE if winner == idle else longest[column][winner][2])
    return winners


def _axis(simulation: Simulation, start: int, stop: int, width: int, say: Say) -> str:
    """Draw times below the bars, each at the right of a mark at its place; the last one left of it."""
    num_marks = max(2, min(5, width // 16 + 1))
    line = [" "] * width
    for mark in range(num_marks):
        text = say(simulation.in_unit(start + (stop - start) * mark // (num_marks - 1)))
        place = (width - 1) * mark // (num_marks - 1)
        label = f"{text}|" if mark == num_marks - 1 else f"|{text}"
        first = place - len(text) if mark == num_marks - 1 else place
        line[first : first + len(label)] = label
    return "".join(line[:width])


def _legend(simulation: Simulation) -> tuple[Text, Text]:
    """Return what the letters that occur mean, with colour in theirs, and what the rest means."""
    legend = Text()
    for op in sorted(set(simulation.actions.ops.tolist())):
        legend.append(LETTERS[op], style=f"black on {_COLOURS[op]}")
        legend.append(f" {OP_WORDS[op]}  ", style="dim")
    label = "F3.1 chunk 3, virtual stage 1 (F3 if narrow)" if simulation.virtual_stages > 1 else "F3 chunk 3"
    if simulation.shares_chunks:
        label += "  F3x4 shared by 4 ranks"
    if simulation.step is not None:
        label += "  : for ranks"
    return legend, Text(f"{label}  . waiting  = on the critical path", style="dim")
