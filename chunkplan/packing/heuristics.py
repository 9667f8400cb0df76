"""The better of the two quick packers."""

from __future__ import annotations

from chunkplan.packing.best_fit_decreasing import best_fit_decreasing
from chunkplan.packing.histogram import Histogram
from chunkplan.packing.minimum_bin_slack import minimum_bin_slack
from chunkplan.packing.solution import Solution


def pack_quickly(items: Histogram, capacity: int) -> Solution:
    """Best-fit decreasing, and minimum bin slack where that is not proved to be best."""
    solution = best_fit_decreasing(items, capacity)
    return solution if solution.optimal else solution.better(minimum_bin_slack(items, capacity))
