"""Searches with CP-SAT for the best schedule of few chunks on few stages, and proves how good one can be."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.cost.durations import ChunkTimes
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import BACKWARD, FORWARD, FORWARD_KV, RECOMPUTE, Actions
from chunkplan.schedule.bounds import jobs_of
from chunkplan.schedule.holdings import peak_retained
from chunkplan.schedule.simulate import simulate

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

#: The solver counts in 2^-20 of the hint's time.
_TIME_BITS = 20


def search_small(
    chunks: Chunks, times: ChunkTimes, pp: int, memory: int, hint: Actions, lower_bound: int, effort: float
) -> tuple[Actions, int, int]:
    """The fastest schedule found with whole backwards, when it is done, and a bound on that: `hint` if none is faster.

    Args:
        memory: tokens whose activations a stage may retain.
        hint: a schedule with whole backwards that fits.
        lower_bound: what is known already.
        effort: most deterministic seconds (of CP-SAT) to search.
    """
    from ortools.sat.python import cp_model

    makespan = int(simulate(chunks, hint, times, pp).max())
    # Rounded down, so that what is proved for the rounded times holds for the true ones.
    unit = max(makespan >> _TIME_BITS, 1)
    rounded = ChunkTimes(times.durations // unit, times.link // unit)
    n = chunks.keeps_activations.size
    work = jobs_of(chunks, rounded, pp).work
    hint_start = _starts(hint, simulate(chunks, hint, rounded, pp), work)
    horizon = makespan // unit + 1

    model = cp_model.CpModel()
    end = model.new_int_var(lower_bound // unit, horizon, "end")
    start = [[model.new_int_var(0, horizon, "") for _ in range(2 * n)] for _ in range(pp)]
    for stage in range(pp):
        intervals = [
            model.new_fixed_size_interval_var(start[stage][job], int(work[stage, job]), "") for job in range(2 * n)
        ]
        model.add_no_overlap(intervals)
        if memory < chunks.num_tokens.sum():
            _add_memory(model, chunks, memory, start[stage], work[stage], intervals, horizon)
        for chunk in range(n):
            model.add(start[stage][n + chunk] >= start[stage][chunk] + int(work[stage, chunk]))
            link = int(rounded.link[chunk])
            if stage > 0:
                sent = start[stage - 1][chunk] + int(work[stage - 1, chunk])
                model.add(start[stage][chunk] >= sent + link)
            if stage + 1 < pp:
                recompute = 0 if chunks.keeps_activations[chunk] else int(rounded.durations[RECOMPUTE, stage, chunk])
                sent = start[stage + 1][n + chunk] + int(work[stage + 1, n + chunk])
                model.add(start[stage][n + chunk] + recompute >= sent + link)
            model.add(end >= start[stage][n + chunk] + int(work[stage, n + chunk]))
    _add_orders(model, chunks, times, start, work)
    for stage in range(pp):
        for job in range(2 * n):
            model.add_hint(start[stage][job], int(hint_start[stage, job]))
    model.minimize(end)

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False  # its handler would end the process from another thread
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    assert status != cp_model.INFEASIBLE, "the hint is a solution"
    lower_bound = max(lower_bound, unit * int(np.ceil(solver.best_objective_bound - 1e-6)))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = _actions(chunks, times, np.array([[solver.value(time) for time in each] for each in start]), hint)
        ends = simulate(chunks, found, times, pp)
        if ends.min() >= 0 and ends.max() < makespan and peak_retained(chunks, found).max() <= memory:
            return found, int(ends.max()), lower_bound
    return hint, makespan, lower_bound


def _add_memory(
    model: cp_model.CpModel,
    chunks: Chunks,
    memory: int,
    start: list[cp_model.IntVar],
    work: Int64Array,
    intervals: list[cp_model.IntervalVar],
    horizon: int,
) -> None:
    """A stage retains kept chunks from forward to backward, others while they are recomputed and backwarded."""
    n = chunks.keeps_activations.size
    retained = intervals[n:]
    for chunk in np.flatnonzero(chunks.keeps_activations).tolist():
        end = model.new_int_var(0, horizon, "")
        model.add(end == start[n + chunk] + int(work[n + chunk]))
        retained[chunk] = model.new_interval_var(start[chunk], model.new_int_var(0, horizon, ""), end, "")
    model.add_cumulative(retained, chunks.num_tokens.tolist(), memory)


def _add_orders(
    model: cp_model.CpModel,
    chunks: Chunks,
    times: ChunkTimes,
    start: list[list[cp_model.IntVar]],
    work: Int64Array,
) -> None:
    """Forwards come in the same order on all stages, and backwards; those of groups, and of equal chunks, in theirs."""
    n = chunks.keeps_activations.size
    alike = np.concatenate([times.durations.reshape(-1, n), times.link[None], chunks.num_tokens[None]])
    for one, other in combinations(range(n), 2):
        together = chunks.group_id[one] == chunks.group_id[other] >= 0
        equal = chunks.group_id[one] == chunks.group_id[other] == -1 and (alike[:, one] == alike[:, other]).all()
        for jobs, is_first in ((0, True), (n, False)):
            first = model.new_bool_var("")
            if together or (equal and jobs == 0):
                model.add(first == int(is_first))
            for starts, stage_work in zip(start, work, strict=True):
                for before, after, chosen in ((one, other, first), (other, one, ~first)):
                    model.add(
                        starts[jobs + after] >= starts[jobs + before] + int(stage_work[jobs + before])
                    ).only_enforce_if(chosen)


def _starts(actions: Actions, ends: Int64Array, work: Int64Array) -> Int64Array:
    """When each job of `work` [pp, 2 n] starts, of the same shape; recomputes no sooner than they have to."""
    pp, n = work.shape[0], work.shape[1] // 2
    start = np.empty_like(work)
    stage = np.repeat(np.arange(pp), np.diff(actions.stages))
    for jobs, kinds in ((0, (FORWARD, FORWARD_KV)), (n, (BACKWARD,))):
        is_job = np.isin(actions.ops, kinds)
        place = stage[is_job], jobs + actions.chunk_ids[is_job]
        start[place] = ends[is_job] - work[place]
    return start


def _actions(chunks: Chunks, times: ChunkTimes, start: Int64Array, like: Actions) -> Actions:
    """The actions of jobs that start at these times [pp, 2 n]; of two that start at once, forwards go first."""
    pp, n = start.shape[0], chunks.keeps_activations.size
    ops, chunk_ids = [], []
    end = start + jobs_of(chunks, times, pp).work
    for stage in range(pp):
        for job in np.lexsort((np.arange(2 * n), end[stage], start[stage])).tolist():
            chunk = job % n
            if job < n:
                ops.append(FORWARD if chunks.keeps_activations[chunk] else FORWARD_KV)
            else:
                ops.extend([BACKWARD] if chunks.keeps_activations[chunk] else [RECOMPUTE, BACKWARD])
                chunk_ids.extend([] if chunks.keeps_activations[chunk] else [chunk])
            chunk_ids.append(chunk)
    return like._replace(ops=np.array(ops, np.int8), chunk_ids=np.array(chunk_ids, np.int32))
