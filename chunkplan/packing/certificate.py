"""How few bins can do, better than by counting: bounds from what items are worth.

If items have values such that no bin holds items worth more than v, there are at least (worth of all items) / v bins
(Farley, "A note on bounding a class of linear programming problems, including cutting stock problems", 1990). Any
values prove a bound; those of the linear relaxation prove the best. They are found on rounded lengths and interpolated
between; then the most valuable bin is found on the lengths themselves, in whole numbers.
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.packing.histogram import Histogram
from chunkplan.packing.relaxation import FINEST, Relaxation, classes, most_valuable, resolution, solve_relaxation


def relaxed_bound(items: Histogram, capacity: int) -> int:
    """The bound that the linear relaxation of rounded lengths proves.

    Items, at least one, have lengths 1 to `capacity`.
    """
    units = resolution(items, capacity)
    nearest = np.maximum((items.distinct * units + capacity // 2) // capacity, 1)
    return bound_by_relaxation(items, solve_relaxation(*classes(nearest, items.counts), units), units, capacity)


def bound_by_relaxation(items: Histogram, relaxation: Relaxation, units: int, capacity: int) -> int:
    """The bound that the values of `relaxation`, with `units` in a bin, prove, interpolated between its sizes."""
    sizes, values = np.append(0, relaxation.sizes), np.append(0, relaxation.values)
    return bound_by_values(
        items, np.interp(items.distinct * (units / capacity), sizes, values).astype(np.int64), capacity
    )


def bound_by_values(items: Histogram, values: Int64Array, capacity: int) -> int:
    """The bound that values of items of each length prove: int64 [num_distinct], at most VALUE_UNITS; at least 1.

    Where the capacity is too large to look at every room, lengths are rounded down: a bin then holds more than it can,
    and the bound is lower than it could be.
    """
    units = min(capacity, FINEST)
    rounded = items.distinct * units // capacity
    values = np.where(rounded > 0, values, 0)
    sizes, starts = np.unique(rounded, return_index=True)
    most, _ = most_valuable(sizes, np.maximum.reduceat(values, starts), units)
    worth = int(items.counts @ values)
    return max(1, -(-worth // max(1, int(most[-1]))))
