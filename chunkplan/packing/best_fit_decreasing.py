"""Best-fit decreasing over the histogram of lengths.

Items are placed longest first, each into the bin it leaves least room in (Johnson 1973). Bins with equal room behave
alike, so that runs of bins are filled at once, with as many items of the length at hand as fit. Lengths descend, so a
bin with too little room for one length, once it has enough for a later one, has less than all that had enough before:
bins that fit are a stack, those that do not yet fit a heap. The work depends on the number of distinct lengths, and on
items only where their bins are written down; the capacity does not matter.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.packing.bounds import martello_toth_counted
from chunkplan.packing.histogram import Histogram
from chunkplan.packing.solution import Solution


def best_fit_decreasing(items: Histogram, capacity: int) -> Solution:
    """Pack `items`, each of length 1 to `capacity`."""
    sorted_bins = np.empty(items.num_items, np.int64)
    num_bins = best_fit_decreasing_counted(items.distinct, items.counts, capacity, sorted_bins)
    return Solution(sorted_bins, num_bins, martello_toth_counted(items.distinct, items.counts, capacity), "bfd")


@compiled
def best_fit_decreasing_counted(
    distinct: Int64Array, counts: Int64Array, capacity: int, sorted_bins: Int64Array
) -> int:
    """Pack counts[i] items of length distinct[i], ascending; returns the number of bins.

    Writes the bin of each item, in ascending order of length, to `sorted_bins` int64 [n].
    """
    # Runs of bins: (room, first bin, number). At the bottom lie the bins not yet opened, more than are needed.
    fitting = [(capacity, 0, sorted_bins.size + 1)]
    waiting = [(0, 0, 0)]  # a heap, by -room; this one never fits
    stop = sorted_bins.size
    for index in range(distinct.size - 1, -1, -1):
        length, left = distinct[index], counts[index]
        while -waiting[0][0] >= length:
            negative_room, start, num_bins = heappop(waiting)
            fitting.append((-negative_room, start, num_bins))
        while left > 0:
            room, start, num_bins = fitting.pop()
            each = room // length
            full = min(num_bins, left // each)
            for target in range(start, start + full):
                sorted_bins[stop - each : stop] = target
                stop -= each
            left -= full * each
            if full > 0 and room - each * length >= distinct[0]:
                heappush(waiting, (each * length - room, start, full))
            if full < num_bins:  # the items do not fill another one
                started = 1 if left > 0 else 0
                fitting.append((room, start + full + started, num_bins - full - started))
                if left > 0:
                    sorted_bins[stop - left : stop] = start + full
                    stop -= left
                    fitting.append((room - left * length, start + full, 1))
                    left = 0
    _, num_opened, _ = fitting[0]
    return num_opened
