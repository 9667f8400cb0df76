"""Spreads the sequences of a step over data-parallel ranks."""

from __future__ import annotations

import heapq

import numpy as np

from chunkplan.arrays import Int32Array, Int64Array


def spread(costs: Int64Array, dp: int) -> Int32Array:
    """The rank of every sequence, int32 [n]: dearest first, each to the rank with the least cost so far.

    Longest-processing-time first (Graham 1969): the heaviest rank is at most 4/3 of the best possible. Spreading
    sequences before they are packed balances better than spreading packed chunks, whose costs are lumps.
    """
    ranks = np.empty(costs.size, np.int32)
    loads = [(0, rank) for rank in range(dp)]
    for sequence in np.argsort(-costs, kind="stable").tolist():
        load, rank = heapq.heappop(loads)
        ranks[sequence] = rank
        heapq.heappush(loads, (load + int(costs[sequence]), rank))
    return ranks
