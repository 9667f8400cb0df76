"""Chunk construction for steps whose sequences are placed: Algorithm 1 of ChunkFlow (arXiv 2503.02356, section 4.1)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.compiled import compiled
from chunkplan.cost.durations import Float64Array
from chunkplan.planning.ranks import Placement, Sequences


class Chunks(NamedTuple):
    """The chunks of every rank of some steps, in the order of the contract, and their segments.

    `rank_chunks` int64 [num_steps * dp + 1]: where the chunks of each rank begin. Per chunk: group_id (-1 for
    standalone), group_index, group_size, num_tokens, prefix_tokens int32, keeps_activations bool; `num_target_tokens`
    int32 and `squares` float64 (see `chunkplan.cost.durations`) of its whole sequences, without its part. `segments`
    int64 [num_chunks + 1]: where the segments of each chunk begin. Per segment: sequence_id int64, start, end int32.
    `part_chunk` int64 [num_parts]: the chunk of each part.
    """

    rank_chunks: Int64Array
    group_id: Int32Array
    group_index: Int32Array
    group_size: Int32Array
    num_tokens: Int32Array
    prefix_tokens: Int32Array
    keeps_activations: BoolArray
    num_target_tokens: Int32Array
    squares: Float64Array
    segments: Int64Array
    sequence_id: Int64Array
    start: Int32Array
    end: Int32Array
    part_chunk: Int64Array


@compiled
def make_chunks(
    step_first: Int64Array,
    sequences: Sequences,
    placement: Placement,
    ids: Int32Array,
    target_tokens: Int32Array,
) -> Chunks:
    """The chunks of steps that `place_steps` placed.

    Standalone chunks come first, then the groups, longest last: on a pipeline the forwards that run between a group's
    backwards are then those of a longer group, most of which hold no activations. A chunk with nothing in it is a
    zero-loss chunk.

    Args:
        ids, target_tokens: [n], of each sequence its id and its targets.
    """
    num_steps, dp = placement.num_standalone.shape
    parts = sequences.parts
    num_split = np.sum(parts[1:] > parts[:-1])
    num_parts = parts[-1]
    num_chunks = placement.num_standalone.sum() + num_parts
    num_segments = sequences.tokens.size - num_split + num_parts
    chunks = Chunks(
        np.zeros(num_steps * dp + 1, np.int64),
        np.full(num_chunks, -1, np.int32),
        np.zeros(num_chunks, np.int32),
        np.ones(num_chunks, np.int32),
        np.zeros(num_chunks, np.int32),
        np.zeros(num_chunks, np.int32),
        np.ones(num_chunks, np.bool_),
        np.zeros(num_chunks, np.int32),
        np.zeros(num_chunks, np.float64),
        np.zeros(num_chunks + 1, np.int64),
        np.empty(num_segments, np.int64),
        np.empty(num_segments, np.int32),
        np.empty(num_segments, np.int32),
        np.empty(num_parts, np.int64),
    )
    chunk_of = np.empty(sequences.tokens.size, np.int64)  # of a split sequence, the chunk of its first part
    rank_parts = np.empty(dp, np.int64)
    for step in range(num_steps):
        first, last = step_first[step], step_first[step + 1]
        rank_parts[:] = 0
        for sequence in range(first, last):
            rank_parts[placement.rank_of[sequence]] += parts[sequence + 1] - parts[sequence]
        for rank in range(dp):
            place = step * dp + rank
            size = placement.num_standalone[step, rank] + rank_parts[rank]
            chunks.rank_chunks[place + 1] = chunks.rank_chunks[place] + size
        _number_chunks(first, last, step, sequences, placement, rank_parts, chunks, chunk_of)
    _fill(sequences, chunks, chunk_of, ids, target_tokens)
    return chunks


@compiled
def _number_chunks(
    first: int,
    last: int,
    step: int,
    sequences: Sequences,
    placement: Placement,
    rank_parts: Int64Array,
    chunks: Chunks,
    chunk_of: Int64Array,
) -> None:
    """Say which chunk each sequence of a step is in, count the chunks' segments, and describe the groups."""
    dp = rank_parts.size
    num_groups = np.zeros(dp, np.int64)
    parts_so_far = np.zeros(dp, np.int64)
    for sequence in range(last - 1, first - 1, -1):  # shortest first
        rank = placement.rank_of[sequence]
        base = chunks.rank_chunks[step * dp + rank]
        num_standalone = placement.num_standalone[step, rank]
        first_part, last_part = sequences.parts[sequence], sequences.parts[sequence + 1]
        if first_part == last_part:
            bin_of = placement.bin_of[sequence]
            chunk = bin_of - rank_parts[rank] if bin_of >= rank_parts[rank] else num_standalone + bin_of
            chunk_of[sequence] = base + chunk
            chunks.segments[base + chunk + 1] += 1
            continue
        chunk_of[sequence] = base + num_standalone + parts_so_far[rank]
        for index in range(last_part - first_part):
            chunk = chunk_of[sequence] + index
            chunks.group_id[chunk] = num_groups[rank]
            chunks.group_index[chunk] = index
            chunks.group_size[chunk] = last_part - first_part
            chunks.keeps_activations[chunk] = sequences.part_keeps[first_part + index]
            chunks.segments[chunk + 1] += 1
        num_groups[rank] += 1
        parts_so_far[rank] += last_part - first_part


@compiled
def _fill(
    sequences: Sequences,
    chunks: Chunks,
    chunk_of: Int64Array,
    ids: Int32Array,
    target_tokens: Int32Array,
) -> None:
    """Write the segments, a chunk's part first, then whole sequences, longest first; sum them up by chunk."""
    for chunk in range(chunks.segments.size - 1):
        chunks.segments[chunk + 1] += chunks.segments[chunk]
    next_segment = chunks.segments[:-1].copy()
    for sequence in range(sequences.tokens.size):
        start = 0
        for part in range(sequences.parts[sequence], sequences.parts[sequence + 1]):
            chunk = chunk_of[sequence] + part - sequences.parts[sequence]
            chunks.part_chunk[part] = chunk
            chunks.prefix_tokens[chunk] = start
            end = start + sequences.part_tokens[part]
            _add_segment(chunks, next_segment, chunk, ids[sequence], start, end)
            start = end
        if start == 0:
            chunk = chunk_of[sequence]
            chunks.num_target_tokens[chunk] += target_tokens[sequence]
            chunks.squares[chunk] += float(sequences.tokens[sequence]) * sequences.tokens[sequence]
            _add_segment(chunks, next_segment, chunk, ids[sequence], 0, sequences.tokens[sequence])


@compiled
def _add_segment(chunks: Chunks, next_segment: Int64Array, chunk: int, sequence_id: int, start: int, end: int) -> None:
    segment = next_segment[chunk]
    next_segment[chunk] += 1
    chunks.sequence_id[segment] = sequence_id
    chunks.start[segment] = start
    chunks.end[segment] = end
    chunks.num_tokens[chunk] += end - start
