"""Best-fit decreasing over the histogram of lengths.

Items are placed longest first, each into the bin it leaves least room in (Johnson 1973). Items of one length are placed
together: the bin that fits the first of them best goes on to fit the next ones best until it is full, so the work
depends on bins and distinct lengths, not on items.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from chunkplan.arrays import Int64Array, IntArray


def best_fit_decreasing(lengths: IntArray, capacity: int) -> Int64Array:
    """Pack items of `lengths` [n], each from 1 to `capacity`; returns each one's bin, int64 [n], 0.. without gaps."""
    assert lengths.size == 0 or (lengths.min() >= 1 and lengths.max() <= capacity)
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    bin_of = np.empty(lengths.size, np.int64)
    open_bins: list[tuple[int, int]] = []  # (room left, bin), sorted
    num_bins = placed = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = placed + count
        while placed < end:
            best = bisect_left(open_bins, (length, 0))
            if best < len(open_bins):
                room, target = open_bins.pop(best)
            else:
                room, target = capacity, num_bins
                num_bins += 1
            fitting = min(room // length, end - placed)
            bin_of[by_length[placed : placed + fitting]] = target
            placed += fitting
            if room > fitting * length:
                insort(open_bins, (room - fitting * length, target))
    return bin_of
