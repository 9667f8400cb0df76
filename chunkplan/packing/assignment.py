"""Packing few items into a given number of bins as a constraint problem: finds a packing or proves there is none."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.packing.histogram import Histogram
from chunkplan.packing.solution import Solution


def close_gap(items: Histogram, capacity: int, best: Solution, *, effort: float) -> Solution:
    """Try every number of bins from the bound to below the `best` known, with `effort` deterministic seconds each."""
    while not best.optimal:
        num_bins = best.lower_bound
        sorted_bins = _assign(items, capacity, num_bins, effort)
        if sorted_bins is None:
            break
        if sorted_bins.size:
            return Solution(sorted_bins, num_bins, num_bins, "exact")
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
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False  # its handler would end the process from another thread
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return np.empty(0, np.int64)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    numbers_in_bins = [[solver.value(number) for number in numbers] for numbers in placed]
    return np.concatenate([np.repeat(np.arange(num_bins), numbers) for numbers in numbers_in_bins])
