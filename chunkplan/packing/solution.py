"""What every packer answers."""

from __future__ import annotations

from dataclasses import dataclass

from chunkplan.arrays import Int64Array


@dataclass(frozen=True)
class Solution:
    """Items of a histogram in `num_bins` bins, 0.. without gaps, made by `algorithm`.

    `sorted_bins` int64 [n]: the bin of each item in ascending order of length. No packing has fewer than `lower_bound`.
    """

    sorted_bins: Int64Array
    num_bins: int
    lower_bound: int
    algorithm: str

    @property
    def optimal(self) -> bool:
        """Whether no packing has fewer bins."""
        return self.num_bins == self.lower_bound

    def better(self, other: Solution) -> Solution:
        """The one with fewer bins, this one if both have as many, with the higher of both bounds."""
        best = min(self, other, key=lambda solution: solution.num_bins)
        return Solution(best.sorted_bins, best.num_bins, max(self.lower_bound, other.lower_bound), best.algorithm)

    def bounded(self, lower_bound: int) -> Solution:
        """This one, now that no packing is known to have fewer than `lower_bound` bins."""
        return Solution(self.sorted_bins, self.num_bins, max(self.lower_bound, lower_bound), self.algorithm)
