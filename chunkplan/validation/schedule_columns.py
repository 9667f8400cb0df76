"""schedule.parquet as arrays, matched with the ranks it belongs to and cut into blocks that are checked at once.

These arrays are independent of the planner and of the schedules on purpose: what follows from a plan's rows is derived
here once more from the rows alone, so that a mistake there is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import pyarrow as pa

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, offsets_of, run_starts
from chunkplan.layers import model_stage_of, stage_of
from chunkplan.operations import BACKWARDS, FORWARDS, OPS
from chunkplan.validation.chunk_columns import ChunkColumns, Violation

#: Ops that ranks do together: forward, recompute and backward.
_KIND = np.array([0 if op in FORWARDS else 2 if op in BACKWARDS else 1 for op in OPS])

#: Actions and chunks of a block: enough for numpy to be fast, few enough to stay near the processor.
BLOCK_ROWS = 1 << 20


@dataclass(frozen=True)
class ScheduleColumns:
    """The rows of schedule.parquet, and all actions one after another.

    `step`, `dp_rank` and `stage` are [num_rows], and `actions` [num_rows + 1] is where those of each row begin. `op`,
    `chunk_id`, `virtual_stage` and `slots` are [num_actions]. `op` is an index into `ops`, which starts with
    `operations.OPS` and ends with what else the file names. `slots` are -1 in rows that have more or fewer:
    `num_slots` [num_rows], how many each has.
    """

    step: Int32Array
    dp_rank: Int32Array
    stage: Int32Array
    actions: Int64Array
    op: Int32Array
    chunk_id: Int32Array
    virtual_stage: Int32Array
    slots: Int64Array
    num_slots: Int64Array
    ops: tuple[str, ...]

    @classmethod
    def of(cls, table: pa.Table) -> ScheduleColumns:
        """Take the columns out of a table that has the schema of schedule.parquet."""
        lists = table.column("actions").chunks
        flat = [array.flatten() for array in lists]
        per_row = np.concatenate([np.diff(array.offsets.to_numpy()) for array in lists])
        codes = {op: code for code, op in enumerate(OPS)}
        words = [array.field("op") for array in flat]
        code_of = [
            np.array([codes.setdefault(str(op), len(codes)) for op in array.dictionary.to_pylist()], np.int32)
            for array in words
        ]
        slots, num_slots = _slots(table, per_row) if "slots" in table.column_names else np.empty((2, 0), np.int64)
        return cls(
            **{name: table.column(name).to_numpy() for name in ("step", "dp_rank", "stage")},
            actions=offsets_of(per_row),
            op=np.concatenate([code[array.indices.to_numpy()] for code, array in zip(code_of, words, strict=True)]),
            **{
                name: np.concatenate([array.field(name).to_numpy() for array in flat])
                for name in ("chunk_id", "virtual_stage")
            },
            slots=slots,
            num_slots=num_slots,
            ops=tuple(codes),
        )


def _slots(table: pa.Table, per_row: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The slot of each action, of rows with so many of them, and how many slots each row has."""
    slots, lists = np.full(int(per_row.sum()), -1), table.column("slots").chunks
    stored = np.concatenate([np.diff(array.offsets.to_numpy()) for array in lists])
    slots[np.repeat(stored == per_row, per_row)] = np.concatenate([array.flatten().to_numpy() for array in lists])[
        np.repeat(stored == per_row, stored)
    ]
    return slots, stored


def match_rows(columns: ChunkColumns, schedule: ScheduleColumns) -> tuple[RankBlock | None, Violation | None]:
    """Find the ranks whose stages have a row each, and the first violation of `schedule-rows`.

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
    return RankBlock(columns, schedule, place[complete][::pp] // pp, rows[complete].reshape(-1, pp)), found


@dataclass(frozen=True)
class Complaint:
    """The first violation, with its chunk and rank; `bad` is true of every rank with one, [num_ranks]."""

    message: str
    chunk_id: int | None
    rank: int
    bad: BoolArray


@dataclass(frozen=True)
class RankBlock:
    """Some ranks, each with its chunks in chunk_id order and the actions of its stages one after another.

    `place` int64 [num_ranks] ascends: that of each rank in `ChunkColumns`; `rows` int64 [num_ranks, pp]: the row of
    each of its stages.

    A *model stage* is virtual_stage x pp + stage, or, of the second virtual stages of a V, 2 pp - 1 - stage; a *slot*
    is a chunk on a model stage, numbered by rank, then model stage, then chunk. What is derived is computed once, when
    it is asked for.
    """

    columns: ChunkColumns
    schedule: ScheduleColumns
    place: Int64Array
    rows: Int64Array

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.place)

    @property
    def pp(self) -> int:
        """The number of stages of each rank."""
        return int(self.rows.shape[1])

    @property
    def num_virtual_stages(self) -> int:
        """The number of virtual stages of each stage."""
        return int(self.columns.config.virtual_stages)

    def take(self, chosen: BoolArray | slice) -> RankBlock:
        """The block of the ranks that are `chosen`, of [num_ranks]."""
        return replace(self, place=self.place[chosen], rows=self.rows[chosen])

    def at(
        self,
        bad: BoolArray,
        message: Callable[[int], str],
        order: Int64Array | None = None,
        named: Int64Array | None = None,
        whole_steps: bool = False,
    ) -> Complaint | None:
        """The complaint about the first action where `bad` [num_actions] holds, None where it is nowhere.

        Args:
            message: what is said of it, by its position in `bad`.
            order: int64 [num_actions], the action at each position of `bad`; by default the position itself.
            named: int64 [num_actions], for each position the one whose chunk is named; by default the position itself.
            whole_steps: whether all ranks of a step are bad where one is.
        """
        if not bad.any():
            return None
        position = int(np.argmax(bad))
        actions = np.arange(bad.size) if order is None else order
        action = int(actions[position])
        bad_ranks = np.zeros(self.num_ranks, bool)
        bad_ranks[self.rank[actions[bad]]] = True
        if whole_steps:
            dp = self.columns.config.dp
            bad_ranks = np.repeat(bad_ranks.reshape(-1, dp).any(axis=1), dp)
        chunk_id = self.chunk_id[action if named is None else actions[named[position]]]
        return Complaint(message(position), int(chunk_id), int(self.rank[action]), bad_ranks)

    # chunks

    @cached_property
    def num_chunks(self) -> Int64Array:
        """The number of chunks of each rank, at least 1; int64 [num_ranks]."""
        offsets = self.columns.rank_chunks
        return offsets[self.place + 1] - offsets[self.place]

    @cached_property
    def chunk_rows(self) -> Int64Array:
        """The row of each chunk in chunks.parquet, int64 [num_chunks]."""
        return ranges(self.columns.rank_chunks[self.place], self.num_chunks)

    @cached_property
    def keeps_activations(self) -> BoolArray:
        """True for chunks that keep their activations, bool [num_chunks]."""
        keeps: BoolArray = self.columns.chunks["keeps_activations"][self.chunk_rows]
        return keeps

    @cached_property
    def group(self) -> Int64Array:
        """The number of each chunk's group within the block, or -1 for a standalone chunk; int64 [num_chunks]."""
        grouped = self.columns.is_grouped[self.chunk_rows]
        rows = self.chunk_rows[grouped]
        ids = self.columns.chunks["group_id"][rows].astype(np.int64) + (1 << 31)
        group = np.full(grouped.size, -1)
        group[grouped] = np.unique(self.columns.place[rows] << 32 | ids, return_inverse=True)[1]
        return group

    # actions, stage by stage

    @cached_property
    def action_offsets(self) -> Int64Array:
        """Start of the actions of each stage of each rank in the block, int64 [num_ranks x pp + 1]."""
        rows = self.rows.ravel()
        return offsets_of(self.schedule.actions[rows + 1] - self.schedule.actions[rows])

    @cached_property
    def action_rows(self) -> Int64Array:
        """The place of each action in the columns of the schedule, int64 [num_actions]."""
        return ranges(self.schedule.actions[self.rows.ravel()], np.diff(self.action_offsets))

    @cached_property
    def op(self) -> Int32Array:
        """The op of each action, as an index into `ops`; int32 [num_actions]."""
        return self.schedule.op[self.action_rows]

    @cached_property
    def chunk_id(self) -> Int32Array:
        """The chunk_id that each action names, int32 [num_actions]."""
        return self.schedule.chunk_id[self.action_rows]

    @cached_property
    def virtual_stage(self) -> Int32Array:
        """The virtual stage that each action names, int32 [num_actions]."""
        return self.schedule.virtual_stage[self.action_rows]

    @cached_property
    def num_actions(self) -> Int64Array:
        """The number of actions of each rank, on all its stages; int64 [num_ranks]."""
        return np.diff(self.action_offsets[:: self.pp])

    @cached_property
    def rank(self) -> Int64Array:
        """The rank of each action, counted within the block; int64 [num_actions]."""
        return np.repeat(np.arange(self.num_ranks), self.num_actions)

    @cached_property
    def stage(self) -> Int64Array:
        """The stage of each action, int64 [num_actions]."""
        return np.repeat(np.tile(np.arange(self.pp), self.num_ranks), np.diff(self.action_offsets))

    @cached_property
    def model_stage(self) -> Int64Array:
        """The model stage of each action, int64 [num_actions]."""
        placement = self.columns.config.placement
        return model_stage_of(self.stage, self.virtual_stage.astype(np.int64), self.pp, placement)

    def place_of(self, model_stage: int) -> tuple[int, int]:
        """The stage and the virtual stage of a model stage."""
        return stage_of(model_stage, self.pp, self.columns.config.placement)

    # slots

    @cached_property
    def num_model_stages(self) -> Int64Array:
        """The number of model stages of each rank that are looked at, int64 [num_ranks].

        These are all of them, unless there are more than the actions are enough for: then some of these lack actions
        already.
        """
        enough = self.num_actions // (2 * self.num_chunks) + 1
        looked_at: Int64Array = np.minimum(self.num_virtual_stages * self.pp, enough)
        return looked_at

    @cached_property
    def slot_offsets(self) -> Int64Array:
        """Start of the slots of each rank, int64 [num_ranks + 1]."""
        return offsets_of(self.num_model_stages * self.num_chunks)

    @cached_property
    def slot(self) -> Int64Array:
        """The slot of each action, or -1 where its chunk or model stage is not looked at; int64 [num_actions]."""
        num_chunks, model_stage = self.num_chunks[self.rank], self.model_stage
        known = (self.chunk_id >= 0) & (self.chunk_id < num_chunks)
        known &= (model_stage >= 0) & (model_stage < self.num_model_stages[self.rank])
        slot: Int64Array = np.where(known, self.slot_offsets[self.rank] + model_stage * num_chunks + self.chunk_id, -1)
        return slot

    # `actions` holds for the ranks from here on

    @cached_property
    def chunk(self) -> Int64Array:
        """The chunk of each action, counted within the block; int64 [num_actions]."""
        return offsets_of(self.num_chunks)[self.rank] + self.chunk_id

    @cached_property
    def by_model_stage(self) -> Int64Array:
        """The actions by rank, then model stage, in the order they are done there; int64 [num_actions]."""
        if not self.virtual_stage.any():
            return np.arange(self.op.size)
        return np.argsort(self.lane, kind="stable")

    @cached_property
    def lane(self) -> Int64Array:
        """A number for the rank and model stage of each action, ascending over both in turn; int64 [num_actions]."""
        return offsets_of(self.num_model_stages)[self.rank] + self.model_stage

    @cached_property
    def meeting(self) -> Int64Array:
        """The number of the meeting of ranks that each action is part of, or -1; int64 [num_actions].

        Ranks meet for what they do with a chunk that they share, on the same model stage: to forward it, to recompute
        it, to backward it. Gradients of weights alone are computed by each rank for itself.
        """
        columns, meeting = self.columns, np.full(self.op.size, -1)
        if not columns.shared.size:
            return meeting
        rows = self.chunk_rows[self.chunk]
        actions = np.flatnonzero(columns.is_shared[rows] & (self.op != OPS.index("backward_weight")))
        leader = columns.leader[np.searchsorted(columns.shared, rows[actions])]
        kind = _KIND[self.op[actions]]
        key = (leader * int(self.num_model_stages.max(initial=1)) + self.model_stage[actions]) * (
            _KIND.max() + 1
        ) + kind
        meeting[actions] = np.unique(key, return_inverse=True)[1]
        return meeting

    @cached_property
    def by_group(self) -> tuple[Int64Array, Int64Array]:
        """The actions of groups, sorted by rank, model stage and group, in the order they are done there.

        Returns:
            Two int64 arrays, [num_actions of groups]: the position of each in `by_model_stage`, and the number of its
            run, which ascends and is the same for all actions of one group on one model stage.
        """
        group = self.group[self.chunk[self.by_model_stage]]
        positions = np.flatnonzero(group >= 0)
        key = self.lane[self.by_model_stage[positions]] << 32 | group[positions]
        order = np.argsort(key, kind="stable")
        return positions[order], np.cumsum(np.diff(key[order], prepend=-1) != 0)


def iter_blocks(ranks: RankBlock) -> Iterator[RankBlock]:
    """Yield all ranks, in blocks of about `BLOCK_ROWS` rows or of one step: its ranks may wait for each other."""
    actions = ranks.schedule.actions
    sizes = ranks.num_chunks + (actions[ranks.rows + 1] - actions[ranks.rows]).sum(axis=1)
    number = (np.cumsum(sizes) // BLOCK_ROWS)[run_starts(ranks.place // ranks.columns.config.dp)]
    borders = np.append(np.flatnonzero(np.diff(number, prepend=-1)), number.size)
    for start, stop in pairwise(borders):
        yield ranks.take(slice(start, stop))


def ranges(starts: Int64Array, sizes: Int64Array) -> Int64Array:
    """The numbers from starts[i] to starts[i] + sizes[i], which is not included, for one i after another."""
    offsets = offsets_of(sizes)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)
