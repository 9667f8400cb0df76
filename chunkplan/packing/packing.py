"""Packs items by any of the algorithms, the slow ones among them, and bounds the number of bins from below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from chunkplan.arrays import Int64Array, IntArray
from chunkplan.compiled import compiled
from chunkplan.config.plan import PACKERS as PACKER_NAMES
from chunkplan.errors import UsageError
from chunkplan.packing.heuristics import best_fit_decreasing_counted, martello_toth_counted, minimum_bin_slack_counted
from chunkplan.packing.histogram import Histogram, Packing, histogram, starts
from chunkplan.packing.relaxation import (
    FINEST,
    Relaxation,
    bound_by_relaxation,
    classes,
    relaxed_bound,
    resolution,
    solve_relaxation,
)
from chunkplan.solver import deterministic_solver

_HEURISTICS = {"bfd": best_fit_decreasing_counted, "mbs": minimum_bin_slack_counted}


def heuristic(algorithm: str, items: Histogram, capacity: int) -> Packing:
    """Pack `items`, each of length 1 to `capacity`, with one of `_HEURISTICS`."""
    bin_of = np.empty(items.num_items, np.int64)
    num_bins = _HEURISTICS[algorithm](items.distinct, items.counts, capacity, bin_of)
    return Packing(bin_of, num_bins, martello_toth_counted(items.distinct, items.counts, capacity), algorithm)


def pack_quickly(items: Histogram, capacity: int) -> Packing:
    """Best-fit decreasing, and minimum bin slack where that is not proved to be best."""
    packing = heuristic("bfd", items, capacity)
    return packing if packing.optimal else packing.better(heuristic("mbs", items, capacity))


# Packing few items into a given number of bins as a constraint problem: finds a packing or proves there is none.


def close_gap(items: Histogram, capacity: int, best: Packing, *, effort: float) -> Packing:
    """Try every number of bins from the bound to below the `best` known, with `effort` deterministic seconds each."""
    while not best.optimal:
        num_bins = best.lower_bound
        sorted_bins = _assign(items, capacity, num_bins, effort)
        if sorted_bins is None:
            break
        if sorted_bins.size:
            return Packing(sorted_bins, num_bins, num_bins, "exact")
        best = best.bounded(num_bins + 1)
    return best


def _assign(items: Histogram, capacity: int, num_bins: int, effort: float) -> Int64Array | None:
    """The bin of each item, in ascending order of length; none of them if there is no packing, None if unknown.

    No bin is empty where `num_bins` is a lower bound, which it has to be.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    placed: list[list[cp_model.IntVar | int]] = []
    num_large = 0
    for length, count in zip(items.distinct.tolist(), items.counts.tolist(), strict=True):
        if 2 * length > capacity:  # no two of these share a bin, and bins are alike: each has one named for it
            placed.append([int(num_large <= target < num_large + count) for target in range(num_bins)])
            num_large += count
        else:
            most = min(count, capacity // length)
            numbers = [model.new_int_var(0, most, "") for _ in range(num_bins)]
            model.add(sum(numbers) == count)
            placed.append([*numbers])
    for in_bin in zip(*placed, strict=True):
        model.add(cp_model.LinearExpr.weighted_sum(in_bin, items.distinct.tolist()) <= capacity)
    solver = deterministic_solver(effort)
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return np.empty(0, np.int64)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    numbers_in_bins = [[solver.value(number) for number in numbers] for numbers in placed]
    return np.concatenate([np.repeat(np.arange(num_bins), numbers) for numbers in numbers_in_bins])


# Items times bins that the constraint solver is asked about, and its deterministic seconds for a number of bins.
_LARGEST_ASSIGNMENT = 20_000
_EFFORT = 1.0


def exact(items: Histogram, capacity: int) -> Packing:
    """The fewest bins that bounded effort finds and proves, by column generation and a constraint solver for few items.

    Where the capacity is over 10080, lengths are rounded up to 1 / 10080 of it for column generation.
    """
    best = pack_quickly(items, capacity)
    if not best.optimal:
        best = best.bounded(relaxed_bound(items, capacity))
    if not best.optimal:
        best = best.better(pack_by_units(items, capacity, min(capacity, FINEST)))
    if items.num_items * best.num_bins <= _LARGEST_ASSIGNMENT:
        best = close_gap(items, capacity, best, effort=_EFFORT)
    return best


# Column generation: the linear relaxation says how often to use which pattern, heuristics pack what rounding leaves.
#
# Gilmore and Gomory, "A linear programming approach to the cutting-stock problem", 1961. Lengths are rounded up to
# units, so that every pattern also holds the items themselves; the smaller the unit, the less is lost and the longer it
# takes.


_EPSILON = 1e-6


def column_generation(items: Histogram, capacity: int) -> Packing:
    """Pack `items`, each of length 1 to `capacity`."""
    return pack_by_units(items, capacity, resolution(items, capacity))


def pack_by_units(items: Histogram, capacity: int, units: int) -> Packing:
    """Pack `items`, each of length 1 to `capacity`, by lengths rounded up to units of which a bin has so many."""
    if items.num_items == 0:
        return pack_quickly(items, capacity)
    sizes, counts = classes(-(-items.distinct * units // capacity), items.counts)
    relaxation = solve_relaxation(sizes, counts, units)
    sorted_bins = np.full(items.num_items, -1, np.int64)
    num_bins = _use_patterns(relaxation, counts, sorted_bins)
    rest = np.flatnonzero(sorted_bins < 0)
    packed_rest = pack_quickly(histogram(np.repeat(items.distinct, items.counts)[rest]), capacity)
    sorted_bins[rest] = num_bins + packed_rest.bin_of
    bound = max(
        martello_toth_counted(items.distinct, items.counts, capacity),
        bound_by_relaxation(items, relaxation, units, capacity),
    )
    return Packing(sorted_bins, num_bins + packed_rest.num_bins, bound, "column-generation")


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


# The packer for everyday use: goes on to slower algorithms only while they can pay, and keeps the best packing.


def auto(items: Histogram, capacity: int) -> Packing:
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


#: The algorithms by name. Each packs items of lengths from 1 to a capacity.
PACKERS: dict[str, Callable[[Histogram, int], Packing]] = dict(
    zip(
        PACKER_NAMES,
        (auto, partial(heuristic, "bfd"), partial(heuristic, "mbs"), column_generation, exact),
        strict=True,
    )
)


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
    packing = PACKERS[algorithm](items, capacity)
    if certify and not packing.optimal and algorithm not in ("auto", "exact"):  # these have looked
        packing = packing.bounded(relaxed_bound(items, capacity))
    return replace(packing, bin_of=items.in_item_order(packing.bin_of))
