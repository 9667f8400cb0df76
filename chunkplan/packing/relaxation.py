"""The linear relaxation of bin packing: how often to use each pattern, the items of one bin, if fractions were allowed.

Patterns are generated as they are needed (Gilmore and Gomory, "A linear programming approach to the cutting-stock
problem", 1961): the master problem gives each item a value, and the most valuable patterns at those values join it. The
values are smoothed towards the best known so far (Wentges, "Weighted Dantzig-Wolfe decomposition for linear
mixed-integer programming", 1997), which takes rounds from hundreds to tens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.packing.heuristics import best_fit_decreasing_counted, minimum_bin_slack_counted
from chunkplan.packing.histogram import Histogram

# How few bins can do, better than by counting: bounds from what items are worth.
#
# If items have values such that no bin holds items worth more than v, there are at least (worth of all items) / v
# bins (Farley, "A note on bounding a class of linear programming problems, including cutting stock problems", 1990).
# Any values prove a bound; those of the linear relaxation prove the best. They are found on rounded lengths and
# interpolated between; then the most valuable bin is found on the lengths themselves, in whole numbers.


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


FloatArray = npt.NDArray[np.float64]

#: Units in a bin at most.
FINEST = 10080
# Rounds of generating patterns; what is known then is used.
_ROUNDS = 60
# Weights of the best values known, tried in turn until a pattern is found.
_SMOOTHING = (0.5, 0.2, 0.0)
# Patterns at least this valuable, relative to the most valuable one, join the master problem.
_NEARLY_BEST = 0.99
_EPSILON = 1e-7
# Units in a bin to choose from: halves, thirds .. of a bin are whole. The most sizes times units to look through.
_RESOLUTIONS = (1260, 2520, 5040, FINEST)
_LARGEST_SEARCH = 1 << 21
# Values are whole multiples of 1 / VALUE_UNITS of a bin, so that sums over items are exact.
VALUE_UNITS = 1 << 30


@dataclass(frozen=True)
class Relaxation:
    """Bins of items that come in classes of `sizes` int64 [num_classes], ascending.

    `patterns`: the classes of the items of one bin, ascending. `used` float64 [num_patterns]: how often the solution
    has each. `values` int64 [num_classes]: what an item of each class is worth, in 1 / VALUE_UNITS of a bin.
    """

    sizes: Int64Array
    patterns: list[Int64Array]
    used: FloatArray
    values: Int64Array


def solve_relaxation(sizes: Int64Array, counts: Int64Array, capacity: int) -> Relaxation:
    """Relax the packing of counts[i] items, at least one, of size sizes[i], ascending, each from 1 to `capacity`."""
    master = _Master(counts)
    master.add(np.full(capacity // size, index) for index, size in enumerate(sizes.tolist()))
    for packer in (minimum_bin_slack_counted, best_fit_decreasing_counted):
        sorted_bins = np.empty(int(counts.sum()), np.int64)
        num_bins = packer(sizes, counts, capacity, sorted_bins)
        master.add(_patterns_of(sorted_bins, counts, num_bins))
    best_values, best_bound = sizes / capacity, 0.0
    while master.solve():
        new: list[Int64Array] = []
        for smoothing in _SMOOTHING:
            values = in_units(smoothing * best_values + (1 - smoothing) * master.values)
            most, last = most_valuable(sizes, values, capacity)
            bound = int(counts @ values) / int(most[capacity])
            if bound > best_bound:
                best_values, best_bound = values / most[capacity], bound
            if master.num_bins <= math.ceil(best_bound - _EPSILON) + _EPSILON:
                break
            enough = int(_NEARLY_BEST * most[capacity])
            candidates = _valuable_patterns(sizes, values, capacity, most, last, enough)
            new = [pattern for pattern in candidates if master.values[pattern].sum() > 1 + _EPSILON]
            if new:
                break
        if not new or master.num_solved == _ROUNDS:
            break
        master.add(new)
    return Relaxation(sizes, master.patterns, master.used(), in_units(best_values))


def resolution(items: Histogram, capacity: int) -> int:
    """Units of length a bin is divided into: as fine as pattern search stays within milliseconds."""
    affordable = [units for units in _RESOLUTIONS if units * items.distinct.size <= _LARGEST_SEARCH]
    return min(capacity, max(affordable, default=min(_RESOLUTIONS)))


def classes(sizes: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Merge items of equal size, of which there are counts[i] each: (distinct sizes, counts)."""
    distinct, starts = np.unique(sizes, return_index=True)
    return distinct, np.add.reduceat(counts, starts)


def in_units(values: FloatArray) -> Int64Array:
    """Values in bins, as whole multiples of 1 / VALUE_UNITS."""
    return np.floor(values * VALUE_UNITS).astype(np.int64)


@compiled
def most_valuable(sizes: Int64Array, values: Int64Array, capacity: int) -> tuple[Int64Array, Int64Array]:
    """For room 0 to `capacity`: what the most valuable items that fit are worth, and the class of one of them or -1."""
    most = np.zeros(capacity + 1, np.int64)
    last = np.full(capacity + 1, -1, np.int64)
    for index in range(sizes.size):
        size, value = sizes[index], values[index]
        if value > 0:
            for room in range(size, capacity + 1):
                if most[room - size] + value > most[room]:
                    most[room] = most[room - size] + value
                    last[room] = index
    return most, last


@compiled
def _valuable_patterns(
    sizes: Int64Array, values: Int64Array, capacity: int, most: Int64Array, last: Int64Array, enough: int
) -> list[Int64Array]:
    """The most valuable pattern with one item of each class, where it is worth `enough`."""
    patterns = []
    for index in range(sizes.size):
        room = capacity - sizes[index]
        if values[index] + most[room] >= enough:
            pattern = [index]
            while last[room] >= 0:
                pattern.append(last[room])
                room -= sizes[last[room]]
            patterns.append(np.sort(np.array(pattern)))
    return patterns


@compiled
def _patterns_of(sorted_bins: Int64Array, counts: Int64Array, num_bins: int) -> list[Int64Array]:
    """The classes of the items of each bin that is not like the one before it."""
    starts = np.zeros(num_bins + 1, np.int64)
    for target in sorted_bins:
        starts[target + 1] += 1
    starts = np.cumsum(starts)
    following = starts[:-1].copy()
    classes = np.empty_like(sorted_bins)
    position = 0
    for index in range(counts.size):
        for target in sorted_bins[position : position + counts[index]]:
            classes[following[target]] = index
            following[target] += 1
        position += counts[index]
    patterns = [classes[starts[0] : starts[1]]]
    for target in range(1, num_bins):
        pattern, before = classes[starts[target] : starts[target + 1]], classes[starts[target - 1] : starts[target]]
        alike = pattern.size == before.size
        for place in range(pattern.size if alike else 0):
            alike = alike and pattern[place] == before[place]
        if not alike:
            patterns.append(pattern)
    return patterns


class _Master:
    """The linear problem over the patterns known so far: the fewest bins that hold `counts` items of each class."""

    def __init__(self, counts: Int64Array) -> None:
        from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

        self.patterns: list[Int64Array] = []
        self.num_bins = math.inf
        self.values = np.zeros(counts.size)
        self.num_solved = 0
        self._solved = False
        self._known: set[bytes] = set()
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._demands = [self._solver.Constraint(float(count), self._solver.infinity()) for count in counts]
        self._solver.Objective().SetMinimization()

    def add(self, patterns: Iterable[Int64Array]) -> None:
        """Add patterns to the master problem; known ones are skipped."""
        for pattern in patterns:
            if (key := pattern.tobytes()) in self._known:
                continue
            self._known.add(key)
            self.patterns.append(pattern)
            times_used = self._solver.NumVar(0.0, self._solver.infinity(), "")
            self._solver.Objective().SetCoefficient(times_used, 1.0)
            for index, number in Counter(pattern.tolist()).items():
                self._demands[index].SetCoefficient(times_used, number)

    def solve(self) -> bool:
        """Find `num_bins` and `values`; false, and they stay, where the solver fails."""
        self.num_solved += 1
        self._solved = self._solver.Solve() == self._solver.OPTIMAL
        if not self._solved:
            return False
        self.num_bins = self._solver.Objective().Value()
        self.values = np.maximum([demand.dual_value() for demand in self._demands], 0.0)
        return True

    def used(self) -> FloatArray:
        """Multiplicity of each pattern in the solution, float64 [num_patterns]; 0 if the solver failed."""
        if not self._solved:
            return np.zeros(len(self.patterns))
        return np.array([variable.solution_value() for variable in self._solver.variables()])
