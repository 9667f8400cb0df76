"""Items by length: packers look at how many there are of each length, not at the items.

They answer with the bin of each item in ascending order of length; `Histogram.in_item_order` takes that back to the
order the items came in. Items of one length are alike, so the first of them gets the first of their bins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from chunkplan.arrays import Int64Array, IntArray
from chunkplan.compiled import compiled


@dataclass(frozen=True)
class Packing:
    """Items in `num_bins` bins, 0.. without gaps, and a certificate: no packing has fewer than `lower_bound` bins.

    `bin_of` int64 [n]: the bin of each item, of those of a histogram in ascending order of length. `algorithm`: what
    made it; of those that `auto` and `exact` try, the best.
    """

    bin_of: Int64Array
    num_bins: int
    lower_bound: int
    algorithm: str

    @property
    def optimal(self) -> bool:
        """True if no packing has fewer bins."""
        return self.num_bins == self.lower_bound

    def better(self, other: Packing) -> Packing:
        """The one with fewer bins, this one if both have as many, with the higher of both bounds."""
        return min(self, other, key=lambda packing: packing.num_bins).bounded(max(self.lower_bound, other.lower_bound))

    def bounded(self, lower_bound: int) -> Packing:
        """This one, now that no packing is known to have fewer than `lower_bound` bins."""
        return replace(self, lower_bound=max(self.lower_bound, lower_bound))


# Lengths up to here, and up to so many times the items, are counted in a table; others are sorted.
_LARGEST_TABLE = 1 << 22
_TABLE_PER_ITEM = 8


@dataclass(frozen=True)
class Histogram:
    """`distinct` int64 [num_distinct] lengths, ascending, and `counts` int64 [num_distinct] of items of each.

    `keys` int [n] says what length each item has: the one with the same number in `distinct_keys` int64 [num_distinct].
    """

    distinct: Int64Array
    counts: Int64Array
    keys: IntArray
    distinct_keys: Int64Array

    @property
    def num_items(self) -> int:
        """Number of items, n."""
        return self.keys.size

    def in_item_order(self, sorted_bins: Int64Array) -> Int64Array:
        """Map the bins of items in ascending order of length to the order of the items, both int64 [n]."""
        following = np.zeros(int(self.distinct_keys.max(initial=0)) + 1, np.int64)
        following[self.distinct_keys] = starts(self.counts)
        bin_of = np.empty(self.num_items, np.int64)  # not in compiled code: numpy gets huge pages, which are faster
        _scatter(self.keys, following, sorted_bins, bin_of)
        return bin_of


def histogram(lengths: IntArray) -> Histogram:
    """Count items of `lengths` [n], each at least 1."""
    longest = int(lengths.max(initial=0))
    if longest <= min(_LARGEST_TABLE, _TABLE_PER_ITEM * lengths.size):
        table = _count(lengths, longest)
        distinct = np.flatnonzero(table)
        return Histogram(distinct, table[distinct], lengths, distinct)
    distinct, keys, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    return Histogram(distinct.astype(np.int64), counts, keys, np.arange(distinct.size))


@compiled
def starts(counts: Int64Array) -> Int64Array:
    """The first item of each length in ascending order, int64 [num_distinct]."""
    return np.cumsum(counts) - counts


@compiled
def _count(lengths: IntArray, longest: int) -> Int64Array:
    table = np.zeros(longest + 1, np.int64)
    for length in lengths:
        table[length] += 1
    return table


@compiled
def _scatter(keys: IntArray, following: Int64Array, sorted_bins: Int64Array, bin_of: Int64Array) -> None:
    for item in range(keys.size):
        key = keys[item]
        bin_of[item] = sorted_bins[following[key]]
        following[key] += 1
