"""schedule.parquet as arrays, matched with the ranks it belongs to and cut into blocks that are checked at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import pyarrow as pa

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, offsets_of
from chunkplan.operations import OPS
from chunkplan.validation.chunk_columns import ChunkColumns
from chunkplan.validation.violation import Violation

#: Actions and chunks of a block: enough for numpy to be fast, few enough to stay near the processor.
_BLOCK_ROWS = 1 << 20


@dataclass(frozen=True)
class ScheduleColumns:
    """The rows, and all actions one after another; `actions` [num_rows + 1] is where those of each row begin.

    `op` is an index into `ops`, which starts with `operations.OPS` and ends with what else the file names.
    """

    step: Int32Array
    dp_rank: Int32Array
    stage: Int32Array
    actions: Int64Array
    op: Int32Array
    chunk_id: Int32Array
    virtual_stage: Int32Array
    ops: tuple[str, ...]

    @classmethod
    def of(cls, table: pa.Table) -> ScheduleColumns:
        """The columns of a table of the contract."""
        lists = table.column("actions").chunks
        flat = [array.flatten() for array in lists]
        per_row = np.concatenate([np.diff(array.offsets.to_numpy()) for array in lists])
        codes = {op: code for code, op in enumerate(OPS)}
        words = [array.field("op") for array in flat]
        code_of = [
            np.array([codes.setdefault(str(op), len(codes)) for op in array.dictionary.to_pylist()], np.int32)
            for array in words
        ]
        return cls(
            **{name: table.column(name).to_numpy() for name in ("step", "dp_rank", "stage")},
            actions=offsets_of(per_row),
            op=np.concatenate([code[array.indices.to_numpy()] for code, array in zip(code_of, words, strict=True)]),
            **{
                name: np.concatenate([array.field(name).to_numpy() for array in flat])
                for name in ("chunk_id", "virtual_stage")
            },
            ops=tuple(codes),
        )


@dataclass(frozen=True)
class Ranks:
    """Ranks of steps whose schedule is complete: their places in `ChunkColumns`, and the row of each of their stages.

    `place` [num_ranks] ascends; `rows` is [num_ranks, pp].
    """

    place: Int64Array
    rows: Int64Array


def match_rows(columns: ChunkColumns, schedule: ScheduleColumns) -> tuple[Ranks | None, Violation | None]:
    """The ranks whose stages have a row each, and the first violation of `schedule-rows`.

    There are no ranks where rows are not sorted by step, or lack a whole step. The chunks' invariants must hold.
    """
    num_steps, dp, pp = columns.num_steps, columns.config.dp, columns.config.pp
    step, rank, stage = (values.astype(np.int64) for values in (schedule.step, schedule.dp_rank, schedule.stage))
    runs = np.flatnonzero(np.diff(step, prepend=step[0] - 1))
    steps = step[runs[:num_steps]]
    wrong = np.flatnonzero(steps != np.arange(steps.size))
    if wrong.size or steps.size < num_steps:
        expected = int(wrong[0]) if wrong.size else steps.size
        what = f"step {steps[expected]}" if wrong.size else "the end"
        return None, Violation("schedule-rows", f"rows of step {expected} expected, found {what}", expected)
    num_rows = runs[num_steps] if runs.size > num_steps else step.size
    step, rank, stage = step[:num_rows], rank[:num_rows], stage[:num_rows]
    astray = (rank < 0) | (rank >= dp) | (stage < 0) | (stage >= pp)
    rows = np.flatnonzero(~astray)
    place = ((step * dp + rank) * pp + stage)[rows]
    order = np.argsort(place, kind="stable")
    order = order[np.diff(place[order], append=-1) != 0]  # of rows that come twice, the last one
    rows, place = rows[order], place[order]
    bad = np.bincount(place // (dp * pp), minlength=num_steps) != dp * pp
    bad[step[astray]] = True
    complete = ~bad[place // (dp * pp)]
    found = None
    if bad.any():
        first = int(np.argmax(bad))
        strangers = rank[astray & (step == first)]
        ranks = place[place // (dp * pp) == first] // pp % dp
        absent = int(strangers[0]) if strangers.size else int(np.argmax(np.bincount(ranks, minlength=dp) < pp))
        found = Violation("schedule-rows", "rows missing or extra", first, absent)
    elif rows.size != schedule.step.size:
        found = Violation("schedule-rows", "rows come twice, or for steps that are not there")
    return Ranks(place[complete][::pp] // pp, rows[complete].reshape(-1, pp)), found


@dataclass(frozen=True)
class Block:
    """Some ranks, each with its chunks in chunk_id order and the actions of its stages one after another.

    A *model part* is virtual_stage x pp + stage; a *slot* is a chunk on a model part, numbered by rank, then model
    part, then chunk. What is derived is computed once, when it is asked for.
    """

    columns: ChunkColumns
    schedule: ScheduleColumns
    ranks: Ranks

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.ranks.place)

    @property
    def pp(self) -> int:
        """Stages of each rank."""
        return int(self.ranks.rows.shape[1])

    @property
    def num_virtual(self) -> int:
        """Virtual stages of each stage."""
        return int(self.columns.config.virtual_stages)

    def without(self, bad: BoolArray) -> Block:
        """The ranks that are not `bad` [num_ranks]."""
        return Block(self.columns, self.schedule, Ranks(self.ranks.place[~bad], self.ranks.rows[~bad]))

    # chunks

    @cached_property
    def first_chunk(self) -> Int64Array:
        """Where the chunks of each rank begin, [num_ranks + 1]."""
        return offsets_of(self.num_chunks)

    @cached_property
    def num_chunks(self) -> Int64Array:
        """The chunks of each rank, [num_ranks]; at least 1."""
        first = self.columns.rank_chunks
        return first[self.ranks.place + 1] - first[self.ranks.place]

    @cached_property
    def chunk_rows(self) -> Int64Array:
        """The rows of the chunks."""
        return _runs(self.columns.rank_chunks[self.ranks.place], self.num_chunks)

    @cached_property
    def keeps_activations(self) -> BoolArray:
        """Of each chunk."""
        keeps: BoolArray = self.columns.chunks["keeps_activations"][self.chunk_rows]
        return keeps

    @cached_property
    def group(self) -> Int64Array:
        """A number for the group of each chunk, of its own for every group of the block; -1 when standalone."""
        grouped = self.columns.is_grouped[self.chunk_rows]
        rows = self.chunk_rows[grouped]
        ids = self.columns.chunks["group_id"][rows].astype(np.int64) + (1 << 31)
        group = np.full(grouped.size, -1)
        group[grouped] = np.unique(self.columns.place[rows] << 32 | ids, return_inverse=True)[1]
        return group

    # actions, stage by stage

    @cached_property
    def first_action(self) -> Int64Array:
        """Where the actions of each stage of each rank begin, [num_ranks x pp + 1]."""
        rows = self.ranks.rows.ravel()
        return offsets_of(self.schedule.actions[rows + 1] - self.schedule.actions[rows])

    @cached_property
    def action_rows(self) -> Int64Array:
        """Where the actions are in the columns of the schedule."""
        return _runs(self.schedule.actions[self.ranks.rows.ravel()], np.diff(self.first_action))

    @cached_property
    def op(self) -> Int32Array:
        """Index into `ops` of each action."""
        return self.schedule.op[self.action_rows]

    @cached_property
    def chunk_id(self) -> Int32Array:
        """Of each action."""
        return self.schedule.chunk_id[self.action_rows]

    @cached_property
    def virtual_stage(self) -> Int32Array:
        """Of each action."""
        return self.schedule.virtual_stage[self.action_rows]

    @cached_property
    def num_actions(self) -> Int64Array:
        """The actions of each rank, on all stages."""
        return np.diff(self.first_action[:: self.pp])

    @cached_property
    def rank(self) -> Int64Array:
        """The rank of each action, counted within the block."""
        return np.repeat(np.arange(self.num_ranks), self.num_actions)

    @cached_property
    def stage(self) -> Int64Array:
        """The stage of each action."""
        return np.repeat(np.tile(np.arange(self.pp), self.num_ranks), np.diff(self.first_action))

    @cached_property
    def part(self) -> Int64Array:
        """The model part of each action."""
        part: Int64Array = self.virtual_stage.astype(np.int64) * self.pp + self.stage
        return part

    # slots

    @cached_property
    def num_parts(self) -> Int64Array:
        """The model parts of each rank that are looked at.

        All of them, unless there are more than the actions are enough for: then some of these lack actions already.
        """
        enough: Int64Array = np.minimum(self.num_virtual * self.pp, self.num_actions // (2 * self.num_chunks) + 1)
        return enough

    @cached_property
    def first_slot(self) -> Int64Array:
        """Where the slots of each rank begin, [num_ranks + 1]."""
        return offsets_of(self.num_parts * self.num_chunks)

    @cached_property
    def slot(self) -> Int64Array:
        """The slot of each action; -1 where the chunk, or the model part, is none that is looked at."""
        num_chunks, num_parts = self.num_chunks[self.rank], self.num_parts[self.rank]
        known = (self.chunk_id >= 0) & (self.chunk_id < num_chunks) & (self.part >= 0) & (self.part < num_parts)
        slot: Int64Array = np.where(known, self.first_slot[self.rank] + self.part * num_chunks + self.chunk_id, -1)
        return slot

    # `actions` holds for the ranks from here on

    @cached_property
    def chunk(self) -> Int64Array:
        """The chunk of each action, counted within the block."""
        return self.first_chunk[self.rank] + self.chunk_id

    @cached_property
    def by_part(self) -> Int64Array:
        """The actions by rank, then model part; in the order they are done within it."""
        if not self.virtual_stage.any():
            return np.arange(self.op.size)
        return np.argsort(self.lane, kind="stable")

    @cached_property
    def lane(self) -> Int64Array:
        """A number for the rank and model part of each action, ascending over ranks, then model parts."""
        return offsets_of(self.num_parts)[self.rank] + self.part

    @cached_property
    def by_group(self) -> tuple[Int64Array, Int64Array]:
        """Positions in `by_part` of the actions of groups, by model part, then group; in their order within it.

        And a number for the model part and group of each, ascending.
        """
        group = self.group[self.chunk[self.by_part]]
        positions = np.flatnonzero(group >= 0)
        key = self.lane[self.by_part[positions]] << 32 | group[positions]
        order = np.argsort(key, kind="stable")
        return positions[order], np.cumsum(np.diff(key[order], prepend=-1) != 0)


def iter_blocks(columns: ChunkColumns, schedule: ScheduleColumns, ranks: Ranks) -> Iterator[Block]:
    """All ranks, in blocks of bounded size."""
    sizes = np.diff(columns.rank_chunks)[ranks.place]
    sizes += (schedule.actions[ranks.rows + 1] - schedule.actions[ranks.rows]).sum(axis=1)
    number = np.cumsum(sizes) // _BLOCK_ROWS
    borders = np.append(np.flatnonzero(np.diff(number, prepend=-1)), number.size)
    for low, high in pairwise(borders):
        yield Block(columns, schedule, Ranks(ranks.place[low:high], ranks.rows[low:high]))


def _runs(first: Int64Array, sizes: Int64Array) -> Int64Array:
    """first[i], first[i] + 1, ... : sizes[i] numbers each."""
    starts = offsets_of(sizes)
    return np.arange(starts[-1]) + np.repeat(first - starts[:-1], sizes)
