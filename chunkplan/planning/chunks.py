"""Makes the chunks of steps whose sequences are placed: Algorithm 1 of ChunkFlow (arXiv 2503.02356, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chunkplan.arrays import Int32Array, Int64Array, offsets_of
from chunkplan.compiled import compiled, compiled_in_place
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import ChunkTimes
from chunkplan.cost.model import CostModel
from chunkplan.operations import OPS
from chunkplan.planfile.chunks import Chunks, empty_chunks, times_of
from chunkplan.planning.forest import Forest
from chunkplan.planning.ranks import SLICES, RankAssignment, Sequences
from chunkplan.planning.splitting import TargetMask, count_part_targets


@dataclass(frozen=True)
class ChunkedBlock:
    """The sequences of some steps with their ranks and bins, and the chunks that they make.

    `step_starts` int64 [num_steps + 1]: offsets of each step's sequences; `ids` int32, `necessary_ns` int64
    [num_sequences]: forward and backward of each as a whole, without the overhead of chunks; `times`: those of the
    plan's schedule; `cost_ns`, `recompute_ns` int64 [num_chunks]: the time of each chunk on all model stages, and the
    recomputation in it. `bound_ns` int64 [num_steps]: see `share_sequences`; None where no sequence may be shared.
    `forest`: the trees among the sequences, each of which counts as one; None where prefixes are not shared.
    """

    step_starts: Int64Array
    ids: Int32Array
    necessary_ns: Int64Array
    sequences: Sequences
    assignment: RankAssignment
    chunks: Chunks
    times: ChunkTimes
    cost_ns: Int64Array
    recompute_ns: Int64Array
    bound_ns: Int64Array | None
    forest: Forest | None = None


@compiled
def make_chunks(
    step_starts: Int64Array,
    sequences: Sequences,
    assignment: RankAssignment,
    ids: Int32Array,
    target_tokens: Int32Array,
    may_share: bool,
) -> Chunks:
    """Make the chunks of steps from the result of `assign_and_pack`, without targets of parts, pairs and cost.

    Shared chunks come first, those of the widest blocks before others: the ranks of a block start alike, and so meet in
    one order. Then come standalone chunks, then the rank's own groups, longest last: on a pipeline the forwards that
    run between a group's backwards are then those of a longer group, most of which hold no activations. An empty chunk
    is a zero-loss chunk.

    Args:
        ids, target_tokens: [num_sequences], id and number of targets of each.
        may_share: number groups through a step, in the order in which ranks meet, and not through each rank.
    """
    num_steps, dp = assignment.num_standalone.shape
    parts = sequences.parts
    own_parts = own_split = num_slices = 0
    for sequence in range(sequences.tokens.size):
        num_parts = parts[sequence + 1] - parts[sequence]
        if sequences.cp_first_rank[sequence] >= 0:
            size, heads = sequences.cp_size[sequence], sequences.cp_heads[sequence]
            num_slices += num_parts * size * _num_slices(size, heads) - 1
        elif num_parts > 0:
            own_parts += num_parts
            own_split += 1
    num_chunks = assignment.num_standalone.sum() + assignment.num_shared.sum() + own_parts
    num_segments = sequences.tokens.size - own_split + own_parts + num_slices
    chunks = empty_chunks(num_steps * dp, num_chunks, num_segments)
    chunk_of = np.empty(sequences.tokens.size, np.int64)  # [num_sequences]; of a split one that of its first part
    rank_parts = np.empty(dp, np.int64)  # [dp]
    for step in range(num_steps):
        start, stop = step_starts[step], step_starts[step + 1]
        rank_parts[:] = 0
        for sequence in range(start, stop):
            if assignment.rank_of[sequence] >= 0:
                rank_parts[assignment.rank_of[sequence]] += parts[sequence + 1] - parts[sequence]
        for rank in range(dp):
            place = step * dp + rank
            size = assignment.num_shared[step, rank] + assignment.num_standalone[step, rank] + rank_parts[rank]
            chunks.rank_chunks[place + 1] = chunks.rank_chunks[place] + size
        num_groups = _number_shared(start, stop, step, dp, sequences, chunks, chunk_of)
        _number_chunks(start, stop, step, sequences, assignment, rank_parts, chunks, chunk_of, num_groups, may_share)
    for chunk in range(chunks.segments.size - 1):
        chunks.segments[chunk + 1] += chunks.segments[chunk]
    next_segment = chunks.segments[:-1].copy()  # [num_chunks]
    for step in range(num_steps):
        start, stop = step_starts[step], step_starts[step + 1]
        _fill_shared(start, stop, step * dp, sequences, chunks, chunk_of, next_segment, ids)
    _fill(sequences, chunks, chunk_of, next_segment, ids, target_tokens)
    return chunks


@compiled
def _num_slices(size: np.int64, heads: np.int64) -> int:
    """Slices of a chunk that each of `size` ranks holds, of which `heads` share the heads."""
    return 1 if size == heads else SLICES


@compiled
def _number_shared(
    start: int, stop: int, step: int, dp: int, sequences: Sequences, chunks: Chunks, chunk_of: Int64Array
) -> int:
    """Number the chunks of a step's shared sequences on their ranks and describe their groups; returns how many.

    Blocks are nested, and the widest come first: all ranks of a block have shared the same before, so that a chunk has
    the same number on each of them.
    """
    num_shared = np.zeros(dp, np.int64)  # [dp], chunks so far
    num_groups = 0
    size = np.int64(1)
    for sequence in range(start, stop):
        size = max(size, sequences.cp_size[sequence])
    while size > 1:
        narrower = np.int64(1)
        for sequence in range(start, stop):
            own_size = sequences.cp_size[sequence]
            if own_size < size:
                narrower = max(narrower, own_size)
            if own_size != size:
                continue
            first = sequences.cp_first_rank[sequence]
            chunk_of[sequence] = num_shared[first]
            part_start, part_stop = sequences.parts[sequence], sequences.parts[sequence + 1]
            for rank in range(first, first + size):
                for index in range(part_stop - part_start):
                    chunk = chunks.rank_chunks[step * dp + rank] + num_shared[rank] + index
                    chunks.group_id[chunk] = num_groups
                    chunks.group_index[chunk] = index
                    chunks.group_size[chunk] = part_stop - part_start
                    chunks.last_dependent[chunk] = part_stop - part_start - 1
                    chunks.keeps_activations[chunk] = sequences.part_keeps[part_start + index]
                    chunks.cp_first_rank[chunk] = first
                    chunks.cp_size[chunk] = size
                    chunks.cp_heads[chunk] = sequences.cp_heads[sequence]
                    chunks.cp_tokens[chunk] = sequences.part_tokens[part_start + index]
                    chunks.segments[chunk + 1] += _num_slices(size, sequences.cp_heads[sequence])
                num_shared[rank] += part_stop - part_start
            num_groups += 1
        size = narrower
    return num_groups


@compiled
def _number_chunks(
    start: int,
    stop: int,
    step: int,
    sequences: Sequences,
    assignment: RankAssignment,
    rank_parts: Int64Array,
    chunks: Chunks,
    chunk_of: Int64Array,
    num_shared_groups: int,
    may_share: bool,
) -> None:
    """Number the chunks of a step's sequences that are not shared, count their segments, and describe their groups."""
    dp = rank_parts.size
    num_groups = np.zeros(dp, np.int64)  # [dp]
    next_group = num_shared_groups
    parts_so_far = np.zeros(dp, np.int64)  # [dp]
    for sequence in range(stop - 1, start - 1, -1):  # shortest first
        rank = assignment.rank_of[sequence]
        if rank < 0:
            continue
        base = chunks.rank_chunks[step * dp + rank] + assignment.num_shared[step, rank]
        num_standalone = assignment.num_standalone[step, rank]
        part_start, part_stop = sequences.parts[sequence], sequences.parts[sequence + 1]
        if part_start == part_stop:
            bin_of = assignment.bin_of[sequence]
            chunk = bin_of - rank_parts[rank] if bin_of >= rank_parts[rank] else num_standalone + bin_of
            chunk_of[sequence] = base + chunk
            chunks.segments[base + chunk + 1] += 1
            continue
        chunk_of[sequence] = base + num_standalone + parts_so_far[rank]
        for index in range(part_stop - part_start):
            chunk = chunk_of[sequence] + index
            chunks.group_id[chunk] = next_group if may_share else num_groups[rank]
            chunks.group_index[chunk] = index
            chunks.group_size[chunk] = part_stop - part_start
            chunks.last_dependent[chunk] = part_stop - part_start - 1
            chunks.keeps_activations[chunk] = sequences.part_keeps[part_start + index]
            chunks.segments[chunk + 1] += 1
        num_groups[rank] += 1
        next_group += 1
        parts_so_far[rank] += part_stop - part_start


@compiled_in_place
def _fill_shared(
    start: int,
    stop: int,
    first_place: int,
    sequences: Sequences,
    chunks: Chunks,
    chunk_of: Int64Array,
    next_segment: Int64Array,
    ids: Int32Array,
) -> None:
    """Write the slices that each rank of a step holds of shared sequences; `first_place`: of its first rank."""
    for sequence in range(start, stop):
        size, heads = sequences.cp_size[sequence], sequences.cp_heads[sequence]
        prefix = 0
        for part in range(sequences.parts[sequence], sequences.parts[sequence + 1] if size > 1 else 0):
            for member in range(size):
                place = first_place + sequences.cp_first_rank[sequence] + member
                chunk = chunks.rank_chunks[place] + chunk_of[sequence] + part - sequences.parts[sequence]
                chunks.prefix_tokens[chunk] = prefix
                for half in range(_num_slices(size, heads)):
                    begin, end = slice_of(sequences.part_tokens[part], size, heads, member, half)
                    _add_segment(chunks, next_segment, chunk, ids[sequence], prefix + begin, prefix + end)
            prefix += sequences.part_tokens[part]


@compiled
def slice_of(num_tokens: int, size: int, heads: int, member: int, half: int) -> tuple[int, int]:
    """The tokens [begin, end) of a chunk of `num_tokens` that one of the `size` ranks of a block holds.

    `heads` consecutive ranks share heads, and divide their tokens equally. Of n such groups the i-th has, of 2 n equal
    slices, the i-th from the front and the i-th from the back (zigzag): under a causal mask all do equal work. `half`:
    which of these two; a single group has the whole chunk.
    """
    num_groups = size // heads
    group, member_of_group = divmod(member, heads)
    begin, end = 0, num_tokens
    if num_groups > 1:
        index = group if half == 0 else 2 * num_groups - 1 - group
        begin, end = num_tokens * index // (2 * num_groups), num_tokens * (index + 1) // (2 * num_groups)
    tokens = end - begin
    return begin + tokens * member_of_group // heads, begin + tokens * (member_of_group + 1) // heads


@compiled_in_place
def _fill(
    sequences: Sequences,
    chunks: Chunks,
    chunk_of: Int64Array,
    next_segment: Int64Array,
    ids: Int32Array,
    target_tokens: Int32Array,
) -> None:
    """Write the segments of what is not shared, a chunk's part first, then whole sequences, longest first."""
    for sequence in range(sequences.tokens.size):
        if sequences.cp_first_rank[sequence] >= 0:
            continue
        start = 0
        for part in range(sequences.parts[sequence], sequences.parts[sequence + 1]):
            chunk = chunk_of[sequence] + part - sequences.parts[sequence]
            chunks.prefix_tokens[chunk] = start
            stop = start + sequences.part_tokens[part]
            _add_segment(chunks, next_segment, chunk, ids[sequence], start, stop)
            start = stop
        if start == 0:
            chunk = chunk_of[sequence]
            chunks.num_target_tokens[chunk] += target_tokens[sequence]
            _add_segment(chunks, next_segment, chunk, ids[sequence], 0, sequences.tokens[sequence])


@compiled_in_place
def _add_segment(chunks: Chunks, next_segment: Int64Array, chunk: int, sequence_id: int, start: int, stop: int) -> None:
    segment = next_segment[chunk]
    next_segment[chunk] += 1
    chunks.sequence_id[segment] = sequence_id
    chunks.start[segment] = start
    chunks.end[segment] = stop
    chunks.num_tokens[chunk] += stop - start


def add_part_targets(chunks: Chunks, dp: int, mask: TargetMask | None) -> None:
    """Add to each chunk of a group the targets of the part in it, or of the rank's slices of one that `dp` ranks share.

    The part comes first in its chunk, before whole sequences.
    """
    rows = np.flatnonzero(chunks.group_id >= 0)
    if not rows.size:
        return
    num_own = np.where(chunks.cp_size[rows] > 1, np.diff(chunks.segments)[rows], 1)
    row = np.repeat(rows, num_own)  # [parts and slices]
    segment = np.arange(row.size) + np.repeat(chunks.segments[rows] - offsets_of(num_own)[:-1], num_own)
    rank = np.searchsorted(chunks.rank_chunks, row, side="right") - 1
    home = np.where(chunks.cp_size[row] > 1, rank // dp * dp + chunks.cp_first_rank[row], rank)
    order = np.lexsort((chunks.start[segment], chunks.group_id[row], home))  # those of a sequence one after another
    row, segment = row[order], segment[order]
    start, end = chunks.start[segment].astype(np.int64), chunks.end[segment].astype(np.int64)
    first = np.flatnonzero(start == 0)
    lengths = np.repeat(np.maximum.reduceat(end, first), np.diff(np.append(first, end.size)))
    targets = count_part_targets(chunks.sequence_id[segment], start, end, lengths, mask)
    np.add.at(chunks.num_target_tokens, row, targets.astype(np.int32))


def time_chunks(chunks: Chunks, config: PlanConfig, cost: CostModel) -> tuple[ChunkTimes, Int64Array, Int64Array]:
    """Durations of chunks for schedules, and per chunk its whole cost and the part of it that is recomputing.

    The costs are those on all model stages, in nanoseconds, int64 [num_chunks]; `chunks.cost` gets them.
    """
    times = times_of(chunks, cost, config)
    by_op = dict(zip(OPS, times.durations.sum(axis=1), strict=True))  # op: [num_chunks]
    twice = by_op["forward_kv"] + by_op["recompute"] - by_op["forward"]
    recompute = np.where(chunks.keeps_activations, 0, twice)  # [num_chunks]
    cost_ns = by_op["forward"] + by_op["backward"] + recompute  # [num_chunks]
    chunks.cost[:] = cost_ns / 1e3
    return times, cost_ns, recompute
