"""Packs items by any of the algorithms, and says how far from the fewest bins that can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from chunkplan.arrays import Int64Array, IntArray
from chunkplan.config.plan import PACKERS as PACKER_NAMES
from chunkplan.errors import UsageError
from chunkplan.packing.auto import auto
from chunkplan.packing.best_fit_decreasing import best_fit_decreasing
from chunkplan.packing.certificate import relaxed_bound
from chunkplan.packing.column_generation import column_generation
from chunkplan.packing.exact import exact
from chunkplan.packing.histogram import Histogram, histogram
from chunkplan.packing.minimum_bin_slack import minimum_bin_slack
from chunkplan.packing.solution import Solution

_ALGORITHMS = (auto, best_fit_decreasing, minimum_bin_slack, column_generation, exact)

#: The algorithms by name. Each packs items of lengths from 1 to a capacity.
PACKERS: dict[str, Callable[[Histogram, int], Solution]] = dict(zip(PACKER_NAMES, _ALGORITHMS, strict=True))


@dataclass(frozen=True)
class Packing:
    """Items in `num_bins` bins, 0.. without gaps, and a certificate: no packing has fewer than `lower_bound` bins.

    `bin_of` int64 [n]: the bin of each item. `algorithm`: what made it; of those that `auto` and `exact` try, the best.
    """

    bin_of: Int64Array
    num_bins: int
    lower_bound: int
    algorithm: str

    @property
    def optimal(self) -> bool:
        """Whether no packing has fewer bins."""
        return self.num_bins == self.lower_bound

    @property
    def gap(self) -> float:
        """The share of bins over the bound; 0 for no items."""
        return self.num_bins / self.lower_bound - 1 if self.num_bins else 0.0


def pack_lengths(lengths: IntArray, capacity: int, algorithm: str = "auto", *, certify: bool = True) -> Packing:
    """Pack items of `lengths` [n], each from 1 to `capacity`, with one of `PACKERS`.

    The bound is the best there is, unless not to `certify` saves the time of a linear program: then it is as good as
    what the algorithm itself had to find out.

    Raises:
        UsageError: there is no such algorithm, or an item's length is out of range.
    """
    if algorithm not in PACKERS:
        raise UsageError(f"there is no packing algorithm {algorithm!r}", hint=f"choose one of {', '.join(PACKERS)}")
    if lengths.size and not 1 <= lengths.min() <= lengths.max() <= capacity:
        first = int(np.flatnonzero((lengths < 1) | (lengths > capacity))[0])
        raise UsageError(
            f"item {first} has length {lengths[first]}, expected 1 to {capacity}",
            hint="split or leave out items over the capacity and empty ones",
        )
    items = histogram(lengths)
    solution = PACKERS[algorithm](items, capacity)
    if certify and not solution.optimal and algorithm not in ("auto", "exact"):  # these have looked
        solution = solution.bounded(relaxed_bound(items, capacity))
    return Packing(
        items.in_item_order(solution.sorted_bins), solution.num_bins, solution.lower_bound, solution.algorithm
    )
