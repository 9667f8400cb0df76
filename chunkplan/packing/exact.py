"""The fewest bins, as far as a bounded effort finds and proves them: column generation on the lengths themselves.

Where the capacity is over 10080, lengths are rounded up to 1 / 10080 of it. What is left to find or prove of few items
goes to a constraint solver, which looks at the lengths themselves.
"""

from __future__ import annotations

from chunkplan.packing.assignment import close_gap
from chunkplan.packing.certificate import relaxed_bound
from chunkplan.packing.column_generation import pack_by_units
from chunkplan.packing.histogram import Histogram
from chunkplan.packing.minimum_bin_slack import pack_quickly
from chunkplan.packing.relaxation import FINEST
from chunkplan.packing.solution import Solution

# Items times bins that the constraint solver is asked about, and its deterministic seconds for a number of bins.
_LARGEST_ASSIGNMENT = 20_000
_EFFORT = 1.0


def exact(items: Histogram, capacity: int) -> Solution:
    """Pack `items`, each of length 1 to `capacity`."""
    best = pack_quickly(items, capacity)
    if not best.optimal:
        best = best.bounded(relaxed_bound(items, capacity))
    if not best.optimal:
        best = best.better(pack_by_units(items, capacity, min(capacity, FINEST)))
    if items.num_items * best.num_bins <= _LARGEST_ASSIGNMENT:
        best = close_gap(items, capacity, best, effort=_EFFORT)
    return best
