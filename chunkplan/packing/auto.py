"""The packer for everyday use: goes on to slower algorithms only while they can pay, and keeps the best packing."""

from __future__ import annotations

from chunkplan.packing.certificate import relaxed_bound
from chunkplan.packing.column_generation import column_generation
from chunkplan.packing.histogram import Histogram
from chunkplan.packing.minimum_bin_slack import pack_quickly
from chunkplan.packing.relaxation import resolution
from chunkplan.packing.solution import Solution


def auto(items: Histogram, capacity: int) -> Solution:
    """Pack `items`, each of length 1 to `capacity`."""
    best = pack_quickly(items, capacity)
    if best.optimal:
        return best
    best = best.bounded(relaxed_bound(items, capacity))
    # Rounding up adds half a unit to each item, on average.
    bins_lost_by_rounding = items.num_items / (2 * resolution(items, capacity))
    if best.num_bins - best.lower_bound > bins_lost_by_rounding:
        best = best.better(column_generation(items, capacity))
    return best
