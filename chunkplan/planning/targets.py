"""Counts the target tokens that are predicted in parts of sequences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array, IntArray, offsets_of

#: Given a sequence_id, the target mask of that sequence, bool [num_tokens].
TargetMask = Callable[[int], BoolArray]


def count_part_targets(
    sequence_ids: IntArray, starts: Int64Array, ends: Int64Array, lengths: Int64Array, mask: TargetMask | None
) -> Int64Array:
    """Predictions made in each part [start, end) of a sequence of `length` tokens; all [num_parts], in order.

    The parts of a sequence follow one another. Without `mask` every token but a sequence's first is a target.
    """
    if mask is None:
        whole: Int64Array = ends - starts - (ends == lengths)
        return whole
    counts = np.empty(starts.size, np.int64)
    first = np.flatnonzero(starts == 0)
    for parts in np.split(np.arange(starts.size), first[1:]):
        if parts.size:
            counts[parts] = count_masked_targets(mask(int(sequence_ids[parts[0]])), starts[parts], ends[parts])
    return counts


def count_masked_targets(target: BoolArray, start: Int64Array, end: Int64Array) -> Int64Array:
    """Predictions made in parts [start, end) of a sequence with mask `target`: the targets in [start + 1, end + 1)."""
    before = offsets_of(target)  # before[i]: targets among the first i tokens
    counts: Int64Array = before[np.minimum(end + 1, target.size)] - before[start + 1]
    return counts
