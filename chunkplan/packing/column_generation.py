"""Column generation: the linear relaxation says how often to use which pattern, heuristics pack what rounding leaves.

Gilmore and Gomory, "A linear programming approach to the cutting-stock problem", 1961. Lengths are rounded up to units,
so that every pattern also holds the items themselves; the smaller the unit, the less is lost and the longer it takes.
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.packing.bounds import martello_toth_counted
from chunkplan.packing.certificate import bound_by_relaxation
from chunkplan.packing.histogram import Histogram, histogram, starts
from chunkplan.packing.minimum_bin_slack import pack_quickly
from chunkplan.packing.relaxation import Relaxation, classes, resolution, solve_relaxation
from chunkplan.packing.solution import Solution

_EPSILON = 1e-6


def column_generation(items: Histogram, capacity: int) -> Solution:
    """Pack `items`, each of length 1 to `capacity`."""
    return pack_by_units(items, capacity, resolution(items, capacity))


def pack_by_units(items: Histogram, capacity: int, units: int) -> Solution:
    """Pack `items`, each of length 1 to `capacity`, by lengths rounded up to units of which a bin has so many."""
    if items.num_items == 0:
        return pack_quickly(items, capacity)
    sizes, counts = classes(-(-items.distinct * units // capacity), items.counts)
    relaxation = solve_relaxation(sizes, counts, units)
    sorted_bins = np.full(items.num_items, -1, np.int64)
    num_bins = _use_patterns(relaxation, counts, sorted_bins)
    rest = np.flatnonzero(sorted_bins < 0)
    packed_rest = pack_quickly(histogram(np.repeat(items.distinct, items.counts)[rest]), capacity)
    sorted_bins[rest] = num_bins + packed_rest.sorted_bins
    bound = max(
        martello_toth_counted(items.distinct, items.counts, capacity),
        bound_by_relaxation(items, relaxation, units, capacity),
    )
    return Solution(sorted_bins, num_bins + packed_rest.num_bins, bound, "column-generation")


def _use_patterns(relaxation: Relaxation, counts: Int64Array, sorted_bins: Int64Array) -> int:
    """Use each pattern as often as the solution does, rounded down; then once more while items last, by fraction."""
    whole = np.floor(relaxation.used + _EPSILON).astype(np.int64)
    num_bins, left = 0, counts.copy()
    ends = starts(counts)
    by_fraction = np.argsort(whole - relaxation.used, kind="stable")
    for times, order in ((whole, np.arange(whole.size)), (np.ones_like(whole), by_fraction)):
        for index in order.tolist():
            if times[index] > 0:
                num_bins += _use(relaxation.patterns[index], times[index], num_bins, left, ends, sorted_bins)
    return num_bins


@compiled
def _use(
    pattern: Int64Array, times: int, num_bins: int, left: Int64Array, starts: Int64Array, sorted_bins: Int64Array
) -> int:
    """Fill further bins with a pattern, at most `times` and only while all its items last; longest items first."""
    alike = 0
    for place in range(pattern.size):
        alike = alike + 1 if place > 0 and pattern[place] == pattern[place - 1] else 1
        times = min(times, left[pattern[place]] // alike)
    for target in range(num_bins, num_bins + times):
        for index in pattern:
            left[index] -= 1
            sorted_bins[starts[index] + left[index]] = target
    return times
