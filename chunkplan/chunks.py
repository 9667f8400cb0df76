"""Chunk construction for the sequences of one rank: Algorithm 1 of ChunkFlow (arXiv 2503.02356, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, IntArray
from chunkplan.packing.best_fit_decreasing import best_fit_decreasing
from chunkplan.schedule.actions import ChunkStates


@dataclass(frozen=True)
class RankChunks:
    """The chunks of a rank in a step, in chunk_id order, and their segments, sorted by chunk.

    Per chunk: group_id (-1 for standalone), group_index, group_size int32, keeps_activations bool [num_chunks].
    Per segment: its chunk int32, the position of its sequence among those given, start, end int32 [num_segments].
    """

    group_id: Int32Array
    group_index: Int32Array
    group_size: Int32Array
    keeps_activations: BoolArray
    segment_chunk: Int32Array
    segment_sequence: Int64Array
    segment_start: Int32Array
    segment_end: Int32Array

    @property
    def num_chunks(self) -> int:
        """How many chunks there are."""
        return len(self.group_id)

    @property
    def states(self) -> ChunkStates:
        """What a schedule needs to know."""
        return ChunkStates(group_id=self.group_id, keeps_activations=self.keeps_activations)

    def sum_segments(self, values: IntArray) -> Int64Array:
        """Sum `values` [num_segments] over the segments of each chunk, int64 [num_chunks]."""
        sums = np.zeros(self.num_chunks, np.int64)
        np.add.at(sums, self.segment_chunk, values)
        return sums


def make_chunks(num_tokens: Int32Array, chunk_size: int, k: int) -> RankChunks:
    """Split sequences over `chunk_size` into groups of dependent chunks and pack the others into standalone ones.

    Standalone chunks come first, then the groups, longest last: on a pipeline the forwards that run between a group's
    backwards are then those of a longer group, most of which hold no activations. The last min(N, K) chunks of a
    group keep theirs. Without sequences there is one zero-loss chunk, so that every rank takes part in every step.
    """
    short = np.flatnonzero(num_tokens <= chunk_size)
    bins = best_fit_decreasing(num_tokens[short], chunk_size)
    by_bin = np.argsort(bins, kind="stable")
    num_standalone = int(bins.max()) + 1 if bins.size else 0

    split = np.flatnonzero(num_tokens > chunk_size)
    split = split[np.argsort(num_tokens[split], kind="stable")]
    sizes = -(-num_tokens[split].astype(np.int64) // chunk_size)
    group = np.repeat(np.arange(split.size), sizes)
    index = np.arange(group.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    start = index * chunk_size

    if num_standalone + group.size == 0:
        num_standalone = 1
    alone = np.ones(num_standalone, np.int64)
    return RankChunks(
        group_id=np.concatenate([-alone, group]).astype(np.int32),
        group_index=np.concatenate([0 * alone, index]).astype(np.int32),
        group_size=np.concatenate([alone, sizes[group]]).astype(np.int32),
        keeps_activations=np.concatenate([alone > 0, index >= sizes[group] - k]),
        segment_chunk=np.concatenate([bins[by_bin], num_standalone + np.arange(group.size)]).astype(np.int32),
        segment_sequence=np.concatenate([short[by_bin], split[group]]),
        segment_start=np.concatenate([np.zeros(short.size), start]).astype(np.int32),
        segment_end=np.concatenate(
            [num_tokens[short[by_bin]], np.minimum(start + chunk_size, num_tokens[split[group]])]
        ).astype(np.int32),
    )
