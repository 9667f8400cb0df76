"""Cuts sequences into parts of at most ChunkSize tokens."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.config.plan import Split
from chunkplan.cost.model import CostModel


def count_parts(lengths: Int64Array, chunk_size: int, split: Split, cost: CostModel) -> Int64Array:
    """How many parts `split_sequences` cuts sequences of `lengths` [n] into, which are all longer than `chunk_size`."""
    fewest = -(-lengths // chunk_size)
    if split != "cost":
        return fewest
    ratio = cost.linear_over_square
    equal = np.ceil(_time(lengths, ratio) / (ratio * chunk_size + float(chunk_size) ** 2)).astype(np.int64)
    return np.minimum(np.maximum(equal, fewest), lengths)


def split_sequences(
    lengths: Int64Array, chunk_size: int, split: Split, cost: CostModel
) -> tuple[Int64Array, Int64Array]:
    """Parts of sequences that are all longer than `chunk_size`: how many each has, int64 [n], and where each part ends.

    "full": every part but the last has ChunkSize tokens (ChunkFlow, arXiv 2503.02356, Algorithm 1). "even": as many
    parts, whose lengths differ by one at most. "cost": parts of equal predicted forward time: as few as keep the first,
    which attends to least and so is the longest, within ChunkSize. The last of n full parts does 2n - 1 times the
    attention of the first, so their number grows with the length squared. (Parts of equal length take their place in a
    sequence so long that some would have no token.)
    """
    num_parts = count_parts(lengths, chunk_size, split, cost)
    sequence = np.repeat(np.arange(num_parts.size), num_parts)
    first = np.cumsum(num_parts) - num_parts
    done = np.arange(sequence.size) - first[sequence] + 1
    if split == "full":
        return num_parts, np.minimum(done * chunk_size, lengths[sequence])
    even = done * lengths[sequence] // num_parts[sequence]
    if split == "even":
        return num_parts, even
    # The time of the first t tokens is ratio * t + t^2, but for a factor. Rounding down keeps parts within ChunkSize.
    ratio = cost.linear_over_square
    time = _time(lengths, ratio)[sequence] * (done / num_parts[sequence])
    ends = np.floor((np.sqrt(ratio * ratio + 4 * time) - ratio) / 2).astype(np.int64)
    ends[first + num_parts - 1] = lengths
    sizes = np.diff(ends, prepend=0)
    sizes[first] = ends[first]
    lacking = np.bincount(sequence, weights=(sizes < 1) | (sizes > chunk_size), minlength=lengths.size) > 0
    return num_parts, np.where(lacking[sequence], even, ends)


def _time(lengths: Int64Array, ratio: float) -> np.ndarray:
    return ratio * lengths + lengths.astype(np.float64) ** 2
