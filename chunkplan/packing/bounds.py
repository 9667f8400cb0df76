"""Lower bounds on the number of bins: no packing needs fewer."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import IntArray


def lower_bound(lengths: IntArray, capacity: int) -> int:
    """L2 of Martello and Toth ("Lower bounds and reduction procedures for the bin packing problem", 1990), at least L1.

    For a threshold t <= capacity / 2: items over capacity - t share a bin with nothing counted here, items over
    capacity / 2 share with no other such item, and what items of [t, capacity / 2] do not find room for beside the
    latter needs bins of its own. t = 0 gives at least L1 = ceil(sum / capacity).
    """
    if lengths.size == 0:
        return 0
    items = np.sort(lengths.astype(np.int64))
    total = np.concatenate([[0], np.cumsum(items)])  # total[i]: sum of the i shortest
    half = int(np.searchsorted(items, capacity // 2, side="right"))  # items[half:] are over capacity / 2
    thresholds = np.concatenate([[0], np.unique(items[:half])])
    first = np.searchsorted(items, thresholds, side="left")
    alone = np.searchsorted(items, capacity - thresholds, side="right")  # items[alone:] are over capacity - t
    room = (alone - half) * capacity - (total[alone] - total[half])
    excess = total[half] - total[first] - room
    return int(np.max(items.size - half + np.maximum(0, -(-excess // capacity))))
