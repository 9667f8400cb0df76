"""Makes the chunks of steps whose sequences are placed: Algorithm 1 of ChunkFlow (arXiv 2503.02356, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.compiled import compiled
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import ChunkTimes, attention_pairs_of, chunk_times, split_layers
from chunkplan.cost.model import CostModel
from chunkplan.operations import OPS
from chunkplan.planfile.chunks import Chunks, empty_chunks
from chunkplan.planning.ranks import Placement, Sequences
from chunkplan.planning.splitting import TargetMask, count_part_targets


@dataclass(frozen=True)
class ChunkedBlock:
    """The sequences of some steps, each in its place, and the chunks that they make.

    `step_starts` int64 [num_steps + 1]: where the sequences of each step begin; `ids` int32 [num_sequences]; `times`:
    those of the plan's schedule; `cost_ns`, `recompute_ns` int64 [num_chunks]: the time of everything done with each
    chunk on all model stages, and of what of it is recomputing.
    """

    step_starts: Int64Array
    ids: Int32Array
    sequences: Sequences
    placement: Placement
    chunks: Chunks
    times: ChunkTimes
    cost_ns: Int64Array
    recompute_ns: Int64Array


@compiled
def make_chunks(
    step_starts: Int64Array,
    sequences: Sequences,
    placement: Placement,
    ids: Int32Array,
    target_tokens: Int32Array,
) -> tuple[Chunks, Int64Array]:
    """The chunks of steps that `place_steps` placed, and that of each part, int64 [num_parts].

    Of parts there are the segments; their targets and attention pairs, and what chunks cost, are left to be added.

    Standalone chunks come first, then the groups, longest last: on a pipeline the forwards that run between a group's
    backwards are then those of a longer group, most of which hold no activations. A chunk with nothing in it is a
    zero-loss chunk.

    Args:
        ids, target_tokens: [num_sequences], of each its id and its targets.
    """
    num_steps, dp = placement.num_standalone.shape
    parts = sequences.parts
    num_split = np.sum(parts[1:] > parts[:-1])
    num_parts = parts[-1]
    num_chunks = placement.num_standalone.sum() + num_parts
    num_segments = sequences.tokens.size - num_split + num_parts
    chunks = empty_chunks(num_steps * dp, num_chunks, num_segments)
    part_chunk = np.empty(num_parts, np.int64)  # [num_parts]
    chunk_of = np.empty(sequences.tokens.size, np.int64)  # [num_sequences]; of a split one that of its first part
    rank_parts = np.empty(dp, np.int64)  # [dp]
    for step in range(num_steps):
        start, stop = step_starts[step], step_starts[step + 1]
        rank_parts[:] = 0
        for sequence in range(start, stop):
            rank_parts[placement.rank_of[sequence]] += parts[sequence + 1] - parts[sequence]
        for rank in range(dp):
            place = step * dp + rank
            size = placement.num_standalone[step, rank] + rank_parts[rank]
            chunks.rank_chunks[place + 1] = chunks.rank_chunks[place] + size
        _number_chunks(start, stop, step, sequences, placement, rank_parts, chunks, chunk_of)
    _fill(sequences, chunks, chunk_of, part_chunk, ids, target_tokens)
    return chunks, part_chunk


@compiled
def _number_chunks(
    start: int,
    stop: int,
    step: int,
    sequences: Sequences,
    placement: Placement,
    rank_parts: Int64Array,
    chunks: Chunks,
    chunk_of: Int64Array,
) -> None:
    """Say which chunk each sequence of a step is in, count the chunks' segments, and describe the groups."""
    dp = rank_parts.size
    num_groups = np.zeros(dp, np.int64)  # [dp]
    parts_so_far = np.zeros(dp, np.int64)  # [dp]
    for sequence in range(stop - 1, start - 1, -1):  # shortest first
        rank = placement.rank_of[sequence]
        base = chunks.rank_chunks[step * dp + rank]
        num_standalone = placement.num_standalone[step, rank]
        part_start, part_stop = sequences.parts[sequence], sequences.parts[sequence + 1]
        if part_start == part_stop:
            bin_of = placement.bin_of[sequence]
            chunk = bin_of - rank_parts[rank] if bin_of >= rank_parts[rank] else num_standalone + bin_of
            chunk_of[sequence] = base + chunk
            chunks.segments[base + chunk + 1] += 1
            continue
        chunk_of[sequence] = base + num_standalone + parts_so_far[rank]
        for index in range(part_stop - part_start):
            chunk = chunk_of[sequence] + index
            chunks.group_id[chunk] = num_groups[rank]
            chunks.group_index[chunk] = index
            chunks.group_size[chunk] = part_stop - part_start
            chunks.keeps_activations[chunk] = sequences.part_keeps[part_start + index]
            chunks.segments[chunk + 1] += 1
        num_groups[rank] += 1
        parts_so_far[rank] += part_stop - part_start


@compiled
def _fill(
    sequences: Sequences,
    chunks: Chunks,
    chunk_of: Int64Array,
    part_chunk: Int64Array,
    ids: Int32Array,
    target_tokens: Int32Array,
) -> None:
    """Write the segments, a chunk's part first, then whole sequences, longest first; sum them up by chunk."""
    for chunk in range(chunks.segments.size - 1):
        chunks.segments[chunk + 1] += chunks.segments[chunk]
    next_segment = chunks.segments[:-1].copy()  # [num_chunks]
    for sequence in range(sequences.tokens.size):
        start = 0
        for part in range(sequences.parts[sequence], sequences.parts[sequence + 1]):
            chunk = chunk_of[sequence] + part - sequences.parts[sequence]
            part_chunk[part] = chunk
            chunks.prefix_tokens[chunk] = start
            stop = start + sequences.part_tokens[part]
            _add_segment(chunks, next_segment, chunk, ids[sequence], start, stop)
            start = stop
        if start == 0:
            chunk = chunk_of[sequence]
            chunks.num_target_tokens[chunk] += target_tokens[sequence]
            chunks.attention_pairs[chunk] += float(sequences.tokens[sequence]) * sequences.tokens[sequence]
            _add_segment(chunks, next_segment, chunk, ids[sequence], 0, sequences.tokens[sequence])


@compiled
def _add_segment(chunks: Chunks, next_segment: Int64Array, chunk: int, sequence_id: int, start: int, stop: int) -> None:
    segment = next_segment[chunk]
    next_segment[chunk] += 1
    chunks.sequence_id[segment] = sequence_id
    chunks.start[segment] = start
    chunks.end[segment] = stop
    chunks.num_tokens[chunk] += stop - start


def add_parts(
    chunks: Chunks, part_chunk: Int64Array, sequences: Sequences, ids: Int32Array, mask: TargetMask | None
) -> None:
    """Add to each chunk the attention pairs and the targets of the part in it; `part_chunk` [num_parts] says which."""
    sequence = np.repeat(np.arange(ids.size), np.diff(sequences.parts))
    start = chunks.prefix_tokens[part_chunk].astype(np.int64)
    chunks.attention_pairs[part_chunk] += attention_pairs_of(sequences.part_tokens, start)
    chunks.num_target_tokens[part_chunk] += count_part_targets(
        ids[sequence], start, start + sequences.part_tokens, sequences.tokens[sequence], mask
    ).astype(np.int32)


def time_chunks(chunks: Chunks, config: PlanConfig, cost: CostModel) -> tuple[ChunkTimes, Int64Array, Int64Array]:
    """The times of chunks that schedules need, and of each chunk what it costs and what of that is recomputing.

    The costs are those on all model stages, in nanoseconds, int64 [num_chunks]; `chunks.cost` gets them.
    """
    layers = split_layers(cost.shape.num_layers, config.pp * config.virtual_stages)
    times = chunk_times(chunks.num_tokens, chunks.attention_pairs, cost.rates, layers)
    by_op = dict(zip(OPS, times.durations.sum(axis=1), strict=True))  # op: [num_chunks]
    recompute = np.where(chunks.keeps_activations, 0, by_op["forward_kv"])  # [num_chunks]
    cost_ns = by_op["forward"] + by_op["backward"] + recompute  # [num_chunks]
    chunks.cost[:] = cost_ns / 1e3
    return times, cost_ns, recompute
