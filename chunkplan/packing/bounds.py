"""Lower bounds on the number of bins from counting alone: no packing needs fewer."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled


@compiled
def martello_toth(ascending: Int64Array, capacity: int) -> int:
    """L2 of items sorted `ascending` [n]; see `martello_toth_counted`."""
    return martello_toth_counted(ascending, np.ones_like(ascending), capacity)


@compiled
def martello_toth_counted(distinct: Int64Array, counts: Int64Array, capacity: int) -> int:
    """L2 of Martello and Toth ("Lower bounds and reduction procedures for the bin packing problem", 1990).

    There are counts[i] items of length distinct[i], ascending. For a threshold t <= capacity / 2: items over
    capacity - t share a bin with nothing counted here, items over capacity / 2 share with no other such item, and what
    items of [t, capacity / 2] do not find room for beside the latter needs bins of its own. t = 0 gives L1 at least.
    Both ends of the window move one way as t grows, so one pass over the lengths does.
    """
    half = np.searchsorted(distinct, capacity // 2, side="right")  # distinct[half:] are over capacity / 2
    num_large, room, small = 0, 0, 0
    for index in range(half, distinct.size):
        num_large += counts[index]
        room += counts[index] * (capacity - distinct[index])
    for index in range(half):
        small += counts[index] * distinct[index]
    best = num_large + max(0, -((room - small) // capacity))
    alone = distinct.size  # distinct[alone:] are over capacity - t
    for first in range(half):
        while alone > half and distinct[alone - 1] > capacity - distinct[first]:
            alone -= 1
            room -= counts[alone] * (capacity - distinct[alone])
        best = max(best, num_large + max(0, -((room - small) // capacity)))
        small -= counts[first] * distinct[first]
    return best
