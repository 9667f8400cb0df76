"""steps.parquet and chunks.parquet as arrays, for checks that look at all rows at once.

These arrays are independent of the planner and of the schedules on purpose: what a plan's rows say is derived here once
more, from the rows alone, so that a mistake there is found. Only how often an epoch takes a sequence is the planner's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, IntArray, offsets_of, sum_runs
from chunkplan.config.plan import PlanConfig
from chunkplan.operations import KEPT_ATTENTION
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan
from chunkplan.planfile.schema import codes_of, to_numpy
from chunkplan.planning.selection import expected_copies
from chunkplan.validation.tree_columns import GroupOrder, Prefixes, order_of_groups, runs_before


@dataclass(frozen=True)
class Violation:
    """The first place where an invariant is broken, and how many there are."""

    invariant: str
    message: str
    step: int | None = None
    dp_rank: int | None = None
    chunk_id: int | None = None
    count: int = 1

    @property
    def where(self) -> str:
        """`step 3, rank 0, chunk 2`, as far as it is known."""
        names = (("step", self.step), ("rank", self.dp_rank), ("chunk", self.chunk_id))
        return ", ".join(f"{name} {value}" for name, value in names if value is not None)


class Parts(NamedTuple):
    """Parts of split sequences, [num_parts] each: the chunk that each is in, its sequence and its tokens."""

    chunk: Int64Array
    sequence_id: Int64Array
    start: IntArray
    end: IntArray


@dataclass(frozen=True)
class ChunkColumns:
    """The columns of both files by name, and all segments one after another.

    Arrays of `steps` are [num_steps], those of `chunks` [num_chunks]. `segments` [num_chunks + 1] is where the segments
    of each chunk begin; `sequence_id`, `start` and `end` are [num_segments]. A group_id that is null is -1 here, and
    `is_grouped` [num_chunks] false; kept_attention is its place in `KEPT_ATTENTION`, -1 where it is no word of these.
    A sequence that begins in another one is here that of its own tokens: `start` and `end` count from the first of
    them, `begin` [num_segments] is where that is in the whole one. What is derived is computed once, when it is asked
    for.
    """

    plan: Plan
    analysis: Analysis
    steps: dict[str, npt.NDArray[Any]]
    chunks: dict[str, npt.NDArray[Any]]
    is_grouped: BoolArray
    segments: Int64Array
    sequence_id: Int64Array
    start: Int32Array
    end: Int32Array
    begin: Int32Array
    prefixes: Prefixes

    @classmethod
    def of(cls, plan: Plan, analysis: Analysis, steps: pa.Table, chunks: pa.Table) -> ChunkColumns:
        """Take the columns out of the two tables of `plan`, and its prefixes."""
        lists = chunks.column("segments").chunks
        flat = [array.flatten() for array in lists]
        per_chunk = np.concatenate([np.diff(array.offsets.to_numpy()) for array in lists])
        sequence_id, start, end = (
            np.concatenate([array.field(name).to_numpy() for array in flat]) for name in ("sequence_id", "start", "end")
        )
        prefixes = Prefixes(*(to_numpy(column.combine_chunks()) for column in plan.prefixes().columns))
        row = prefixes.row_of(np.repeat(chunks.column("step").to_numpy(), per_chunk), sequence_id)
        begin = np.append(prefixes.prefix_tokens, np.int32(0))[row]
        return cls(
            plan=plan,
            analysis=analysis,
            steps={name: steps.column(name).to_numpy() for name in steps.column_names},
            chunks={
                name: (column.fill_null(-1) if name == "group_id" else column).to_numpy()
                for name, column in zip(chunks.column_names, chunks.columns, strict=True)
                if name not in ("segments", "kept_attention")
            }
            | {"kept_attention": codes_of(chunks.column("kept_attention"), KEPT_ATTENTION)},
            is_grouped=chunks.column("group_id").is_valid().to_numpy(),
            segments=offsets_of(per_chunk),
            sequence_id=sequence_id,
            start=start - begin,
            end=end - begin,
            begin=begin,
            prefixes=prefixes,
        )

    @property
    def config(self) -> PlanConfig:
        """The plan's configuration."""
        return self.plan.config

    @property
    def num_steps(self) -> int:
        """The number of rows of steps.parquet."""
        return len(self.steps["step"])

    @property
    def num_chunks(self) -> int:
        """The number of rows of chunks.parquet."""
        return len(self.chunks["step"])

    @cached_property
    def place(self) -> Int64Array:
        """The place of each chunk: step x dp + dp_rank, int64 [num_chunks]."""
        place: Int64Array = self.chunks["step"].astype(np.int64) * self.config.dp + self.chunks["dp_rank"]
        return place

    @cached_property
    def rank_chunks(self) -> Int64Array:
        """Start of the chunks of each rank of each step, int64 [num_steps x dp + 1]; `chunk-ids` must hold."""
        return np.append(np.flatnonzero(np.diff(self.place, prepend=-1)), self.num_chunks)

    @cached_property
    def step_chunks(self) -> Int64Array:
        """Start of the chunks of each step, int64 [num_steps + 1]; `chunk-ids` must hold."""
        return self.rank_chunks[:: self.config.dp]

    @property
    def may_share(self) -> bool:
        """True if ranks may share chunks: then the columns for that exist."""
        return self.config.cp != "off"

    @cached_property
    def is_shared(self) -> BoolArray:
        """True for chunks that ranks share, bool [num_chunks]."""
        shared: BoolArray = self.chunks["cp_size"] > 1 if self.may_share else np.zeros(self.num_chunks, bool)
        return shared

    @cached_property
    def shared(self) -> Int64Array:
        """The chunks that ranks share, in order; int64 [num_shared]."""
        return np.flatnonzero(self.is_shared)

    @cached_property
    def leader(self) -> Int64Array:
        """The chunk of the same number on the first rank of each shared chunk's block, or -1; int64 [num_shared]."""
        shared = self.shared
        if not shared.size:
            return shared
        first = self.chunks["step"][shared].astype(np.int64) * self.config.dp + self.chunks["cp_first_rank"][shared]
        leader = self.rank_chunks[first] + self.chunks["chunk_id"][shared]
        return np.where(leader < self.rank_chunks[first + 1], leader, -1)

    # `cp-groups` holds from here on

    @cached_property
    def home(self) -> Int64Array:
        """A number for the rank that has each chunk to itself, or for the block that shares it; int64 [num_chunks]."""
        home = self.place.copy()
        blocks = (
            self.place[self.leader] << 32 | self.chunks["cp_size"][self.shared] if self.shared.size else self.shared
        )
        home[self.shared] = self.num_steps * self.config.dp + np.unique(blocks, return_inverse=True)[1]
        return home

    @cached_property
    def group_parts(self) -> Parts:
        """The parts in chunks, in order of chunks: of a shared chunk the whole part, which the rank has slices of."""
        parts, shared = self.parts, self.shared
        own = Parts(self.part_chunk, self.sequence_id[parts], self.start[parts], self.end[parts])
        if not shared.size:
            return own
        first = self.segments[self.leader]  # where the whole part begins
        start = np.append(self.start, 0)[first].astype(np.int64)
        whole = Parts(shared, np.append(self.sequence_id, 0)[first], start, start + self.chunks["cp_tokens"][shared])
        is_own = ~self.is_shared[own.chunk]
        joined = [np.concatenate([mine[is_own], other]) for mine, other in zip(own, whole, strict=True)]
        order = np.argsort(joined[0], kind="stable")
        return Parts(*(values[order] for values in joined))

    @cached_property
    def is_known(self) -> BoolArray:
        """True for segments whose sequence is in the analysis, bool [num_segments]."""
        known: BoolArray = self.sequence_id.view(np.uint64) < self.analysis.num_sequences  # negative ones are huge
        return known

    @cached_property
    def sequence_tokens(self) -> Int32Array:
        """The own tokens of each segment's sequence, or of the first one where it is unknown; int32 [num_segments]."""
        own: Int32Array = self.per_segment(self.analysis.num_tokens) - self.begin
        return own

    @cached_property
    def is_part(self) -> BoolArray:
        """True for segments that are less than their whole sequence, bool [num_segments]."""
        parts: BoolArray = (self.start != 0) | (self.end != self.sequence_tokens)
        return parts

    @cached_property
    def parts(self) -> Int64Array:
        """The segments that are parts, in order; int64 [num_parts]."""
        return np.flatnonzero(self.is_part)

    @cached_property
    def part_chunk(self) -> Int64Array:
        """The chunk of each part, int64 [num_parts]."""
        return self.chunk_of(self.parts)

    @cached_property
    def k(self) -> Int64Array:
        """Most chunks of each chunk's group that may hold activations, int64 [num_chunks]."""
        most = np.full(self.num_chunks, self.config.k, np.int64)
        num_tokens = self.sequence_tokens[self.parts]
        for longer_than, k in self.config.k_by_length or ():
            most[self.part_chunk[num_tokens > longer_than]] = k
            most[self.is_tree & (self.tree_tokens > longer_than)] = k
        return most

    # trees

    @cached_property
    def chunk_of_segments(self) -> Int64Array:
        """The chunk of every segment, int64 [num_segments]."""
        return np.repeat(np.arange(self.num_chunks), np.diff(self.segments))

    @property
    def step_of_segments(self) -> Int32Array:
        """The step of every segment, int32 [num_segments]."""
        steps: Int32Array = self.chunks["step"][self.chunk_of_segments]
        return steps

    @cached_property
    def _units(self) -> Int64Array:
        """A number for the group of each chunk, or for a standalone one by itself, int64 [num_chunks]."""
        key = self.place << 32 | (self.chunks["group_id"].astype(np.int64) + (1 << 31))
        number: Int64Array = np.unique(key, return_inverse=True)[1]
        return np.where(self.is_grouped, number, number.size + np.arange(number.size))

    @property
    def unit_of_segments(self) -> Int64Array:
        """A number for the group, or the standalone chunk, of every segment; int64 [num_segments]."""
        units: Int64Array = self._units[self.chunk_of_segments]
        return units

    @cached_property
    def is_tree(self) -> BoolArray:
        """True for chunks of groups in which a sequence begins in another one, bool [num_chunks]."""
        return self.is_grouped & np.isin(self._units, self._units[self.chunk_of_segments[self.begin > 0]])

    @cached_property
    def group_start(self) -> Int64Array:
        """The first chunk of each tree's group, -1 for chunks of none; int64 [num_chunks]. Those between are its own,
        where the invariant `groups` holds."""
        _, first, number = np.unique(self._units, return_index=True, return_inverse=True)
        return np.where(self.is_tree, first[number], -1)

    @property
    def tree_tokens(self) -> Int64Array:
        """The tokens of each tree's group, int64 [num_chunks]; of chunks of none those of all."""
        sums = np.zeros(self.num_chunks + 1, np.int64)
        np.add.at(sums, self.group_start, self.chunks["num_tokens"])
        return sums[self.group_start]

    @cached_property
    def segment_before(self) -> Int64Array:
        """The segment that holds the token before each one, see `runs_before`; int64 [num_segments]."""
        begin = self.begin.astype(np.int64)
        return runs_before(self.prefixes, self.step_of_segments, self.sequence_id, self.start + begin, self.end + begin)

    @cached_property
    def group_order(self) -> GroupOrder:
        """The order of the chunks of trees, whose segments have to be in order."""
        of_trees = self.is_tree[self.chunk_of_segments]
        place = np.where(of_trees, np.cumsum(of_trees) - 1, -1)  # among the segments of trees
        before = np.where(self.segment_before >= 0, place[self.segment_before], -1)[of_trees]
        chunk, stated = self.chunk_of_segments[of_trees], self.chunks.get("last_dependent", self.chunks["group_index"])
        return order_of_groups(chunk, before, self.group_start, stated, self.chunks["keeps_activations"])

    @cached_property
    def occurrences(self) -> Callable[[int], Int32Array]:
        """A function from an epoch to the occurrences of each sequence, int32 [num_sequences]; caches the last
        epoch."""
        return lru_cache(maxsize=1)(lambda epoch: expected_copies(self.analysis, self.config, epoch))

    @cached_property
    def epochs(self) -> list[tuple[int, int]]:
        """The number of occurrences in each epoch, before a short last batch is dropped, and the tokens of the longest.

        Epochs that begin after the last step there is are left out.
        """
        epochs: list[tuple[int, int]] = []
        room = self.num_steps * self.config.global_batch
        for epoch in range(min(self.config.epochs, self.num_steps)):
            occurrences = self.occurrences(epoch)
            size = int(occurrences.sum(dtype=np.int64))
            epochs.append((size, int(np.max(self.analysis.num_tokens, where=occurrences > 0, initial=0))))
            room -= size
            if room < 0:
                break
        return epochs

    def per_segment(self, values: Int32Array) -> Int32Array:
        """Take for each segment the value of its sequence: from [num_sequences] to [num_segments]."""
        ids = self.sequence_id if self.is_known.all() else np.where(self.is_known, self.sequence_id, 0)
        return values[ids]

    def chunk_of(self, segments: Int64Array) -> Int64Array:
        """The chunk of each of these segments; int64, of their shape."""
        return np.searchsorted(self.segments, segments, side="right") - 1

    def holds(self, segments: Int64Array) -> BoolArray:
        """True for chunks that hold one of these segments, bool [num_chunks]."""
        holds = np.zeros(self.num_chunks, bool)
        holds[self.chunk_of(segments)] = True
        return holds

    def per_chunk(self, values: npt.NDArray[Any]) -> Int64Array:
        """Sum values [num_segments] over the segments of each chunk; int64 [num_chunks]."""
        return sum_runs(values, self.segments)

    def at(self, bad: BoolArray, message: Callable[[int], str]) -> Violation | None:
        """The violation of the first chunk where `bad` [num_chunks] holds, of an invariant that is yet to be named."""
        if not bad.any():
            return None
        row = int(np.argmax(bad))
        step, dp_rank, chunk_id = (int(self.chunks[name][row]) for name in ("step", "dp_rank", "chunk_id"))
        return Violation("", message(row), step, dp_rank, chunk_id, count=int(bad.sum()))

    def at_step(self, bad: BoolArray, message: Callable[[int], str]) -> Violation | None:
        """The same of the first step where `bad` [num_steps] holds."""
        if not bad.any():
            return None
        row = int(np.argmax(bad))
        return Violation("", message(row), int(self.steps["step"][row]), count=int(bad.sum()))


def part_targets(analysis: Analysis, ids: Int64Array, start: Int32Array, end: Int32Array) -> Int64Array:
    """Count the targets in [start + 1, end + 1) of the sequences `ids`, in any order; int64 [num_parts].

    Raises:
        DataError: the tokens cannot be read.
    """
    stop_target = np.minimum(end.astype(np.int64) + 1, analysis.num_tokens[ids])
    start_target = np.minimum(start.astype(np.int64) + 1, stop_target)
    if not analysis.has_tokens:
        return stop_target - start_target
    counted = np.empty(ids.size, np.int64)
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    for first_id, batch in analysis.tokens().batches():
        targets = batch.column("target")
        parts = order[slice(*np.searchsorted(ordered, (first_id, first_id + batch.num_rows)))]  # those in the batch
        if parts.size:
            offset = to_numpy(targets.offsets)[ids[parts] - first_id].astype(np.int64)
            before_stop = _count_bits(targets.values, offset + stop_target[parts])
            counted[parts] = before_stop - _count_bits(targets.values, offset + start_target[parts])
    return counted


def _count_bits(mask: pa.BooleanArray, stops: Int64Array) -> Int64Array:
    """Count how many of mask[:stop] are true, for each of `stops`; int64, of their shape."""
    packed = np.frombuffer(mask.buffers()[1], np.uint8)
    stops = stops + mask.offset
    whole = offsets_of(np.bitwise_count(packed))
    rest = np.append(packed, 0)[stops >> 3] & ((1 << (stops & 7)) - 1)
    counted: Int64Array = whole[stops >> 3] + np.bitwise_count(rest)
    return counted
