"""Bars of a Gantt chart: what stages of ranks do and when, as the terminal, the page and pictures draw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from chunkplan.planfile.plan import Chunk
from chunkplan.schedule.timeline import Simulation
from chunkplan.schedule.trace import LETTERS

#: Words for ops, in the order of `OPS`.
OP_WORDS = ("forward", "forward, KV only", "recompute", "backward", "backward of inputs", "of weights")


class Bar(NamedTuple):
    """An action of a stage of a rank with a chunk, from `start` to `end`.

    `row`: that of the stage. `op`: index in `OPS`. `wait`: time that the stage waits for other ranks before it.
    `exchange`: nanoseconds of it that are exchange with them. Times are in ticks.
    """

    row: int
    op: int
    start: int
    end: int
    wait: int
    chunk: Chunk
    virtual_stage: int
    model_stage: int
    exchange: int
    is_critical: bool

    def labels(self, *, with_virtual_stage: bool) -> list[str]:
        """Return the letter of the op, then names that say ever more: its chunk, virtual stage, number of ranks."""
        labels = [LETTERS[self.op], f"{LETTERS[self.op]}{self.chunk.chunk_id}"]
        labels += [f"{labels[-1]}.{self.virtual_stage}"] if with_virtual_stage else []
        return [*labels, *([f"{labels[-1]}x{self.chunk.cp_size}"] if self.chunk.cp_size > 1 else [])]


def bars_of(ranks: Mapping[int, Simulation]) -> list[list[Bar]]:
    """List the actions of each row, a stage of one of `ranks`, in order.

    The critical path is that of the rank that is done last; its actions on ranks that are not drawn have no bar.
    """
    last = max(ranks.values(), key=lambda each: int(each.ends.max()))
    critical = {(action.rank, action.place) for action in last.critical_actions}
    rows: list[list[Bar]] = []
    for rank, simulation in ranks.items():
        actions, chunks, first_row = simulation.actions, simulation.chunks, len(rows)
        rows += [[] for _ in range(simulation.pp)]
        columns = (
            *(simulation.stage_of, actions.ops, simulation.starts, simulation.ends, simulation.waits),
            *(actions.chunk_ids, actions.virtual_stages, simulation.model_stages, simulation.exchange_of_actions),
        )
        for place, each in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            stage, op, start, end, wait, chunk, virtual_stage, model_stage, exchange = each
            row, is_critical = first_row + stage, (rank, place) in critical
            bar = Bar(row, op, start, end, wait, chunks[chunk], virtual_stage, model_stage, exchange, is_critical)
            rows[row].append(bar)
    return rows


def gaps_of(row: Sequence[Bar], until: int) -> list[tuple[int, int]]:
    """List from where to where a stage neither works nor waits for other ranks, up to `until`."""
    starts = [0, *(bar.end for bar in row)]
    stops = [*(bar.start - bar.wait for bar in row), until]
    return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
