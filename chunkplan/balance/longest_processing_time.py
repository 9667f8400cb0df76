"""Longest processing time first: each sequence, dearest first, to the rank with the least work so far (Graham 1969).

The heaviest rank gets at most 4/3 of the best possible. Spreading sequences before they are packed balances better than
spreading packed chunks, whose costs are lumps.
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled


@compiled
def spread(work: Int64Array, dp: int) -> Int64Array:
    """The rank of every sequence, int64 [n]; `work` [n] is in descending order. Ties go to the lowest rank."""
    rank_of = np.empty(work.size, np.int64)
    loads = np.zeros(min(dp, max(work.size, 1)), np.int64)
    for sequence in range(work.size):
        lightest = loads.argmin() if sequence >= loads.size else sequence
        rank_of[sequence] = lightest
        loads[lightest] += work[sequence]
    return rank_of
