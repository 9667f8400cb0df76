"""Searches for the order of a rank's chunks on its pipeline: which chunk runs when on which stage.

State-aware 1F1B (ChunkFlow, arXiv 2503.02356) runs chunks in the order they come and warms every stage up by rule.
Better orders exist for the same chunks; memory is their price, and may be bounded. The answer is never slower than
state-aware 1F1B where that fits, and the same on every machine, as effort is counted, not timed.

Chunks A and B are standalone, C and D the parts of one sequence; K = 2, time goes right. Capitals are forwards, small
letters backwards. State-aware 1F1B takes 46 for them, this 42:

    s0 |AABBCCDD............aaaa..bbbb....ddddcccc|
    s1 |..AABBCCDD......aaaa..bbbb....ddddcccc....|
    s2 |....AABBCCDDaaaa..bbbb....ddddcccc........|
    s3 |......AAaaaaBBbbbbCCDDddddcccc............|
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.cost.durations import ChunkTimes
from chunkplan.layers import STRAIGHT
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import BACKWARD, FORWARD, FORWARD_KV, RECOMPUTE, Actions, empty_actions
from chunkplan.schedule.bounds import jobs_of, makespan_bound
from chunkplan.schedule.holdings import peak_retained
from chunkplan.schedule.local_search import local_search
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.templates import state_aware_1f1b
from chunkplan.solver import deterministic_solver

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

# Searches with CP-SAT for the best schedule of few chunks on few stages, and proves how good one can be.


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

    makespan = int(simulate(chunks, hint, times, pp, STRAIGHT, 1).max())
    # Rounded down, so that what is proved for the rounded times holds for the true ones.
    unit = max(makespan >> _TIME_BITS, 1)
    rounded = ChunkTimes(times.durations // unit, times.link // unit)
    n = chunks.keeps_activations.size
    work = jobs_of(chunks, rounded, pp).work
    hint_start = _starts(hint, simulate(chunks, hint, rounded, pp, STRAIGHT, 1), work)
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

    solver = deterministic_solver(effort)
    status = solver.solve(model)
    assert status != cp_model.INFEASIBLE, "the hint is a solution"
    lower_bound = max(lower_bound, unit * int(np.ceil(solver.best_objective_bound - 1e-6)))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = _actions(chunks, times, np.array([[solver.value(time) for time in each] for each in start]), hint)
        ends = simulate(chunks, found, times, pp, STRAIGHT, 1)
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
    """Start of each job of `work` [pp, 2 n], of the same shape; recomputes as late as possible."""
    pp, n = work.shape[0], work.shape[1] // 2
    start = np.empty_like(work)
    stage = np.repeat(np.arange(pp), np.diff(actions.stages))
    for jobs, kinds in ((0, (FORWARD, FORWARD_KV)), (n, (BACKWARD,))):
        is_job = np.isin(actions.ops, kinds)
        place = stage[is_job], jobs + actions.chunk_ids[is_job]
        start[place] = ends[is_job] - work[place]
    return start


def _actions(chunks: Chunks, times: ChunkTimes, start: Int64Array, like: Actions) -> Actions:
    """The actions of jobs that start at `start` [pp, 2 n]; forwards first at equal starts."""
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


#: The local search schedules as many actions, at most, so that it takes a fraction of a second for a rank, about the
#: same whatever its chunks and stages.
_ACTIONS = 2_000_000

#: Up to so many (chunk, stage) pairs CP-SAT goes on after fewer actions, most often to a proven optimum, for as many
#: deterministic seconds at most, so that few chunks may take longer than many.
_PAIRS, _FEWER_ACTIONS, _EFFORT = 40, 200_000, 1.0

#: A result this close to the lower bound is good enough.
_GAP = 0.005


class SearchResult(NamedTuple):
    """A schedule, its makespan, and a lower bound for the same chunks under the same memory."""

    actions: Actions
    makespan: int
    lower_bound: int


def search(chunks: Chunks, times: ChunkTimes, pp: int, memory_tokens: int | None) -> SearchResult:
    """The fastest schedule found: orders of forwards and of backwards, and how they interleave on every stage.

    Args:
        memory_tokens: tokens whose activations a stage may retain at any time, no fewer than `least_memory`; without,
            only K bounds them.
    """
    memory = max(int(chunks.num_tokens.sum()) if memory_tokens is None else memory_tokens, 1)
    actions, template = (empty_actions(chunks.keeps_activations, pp, pp, False) for _ in range(2))
    is_small = chunks.keeps_activations.size * pp <= _PAIRS
    makespan = int(local_search(chunks, times, pp, memory, _FEWER_ACTIONS if is_small else _ACTIONS, actions))
    state_aware_1f1b(chunks, times, pp, 1, 1, template)
    template_end = int(simulate(chunks, template, times, pp, STRAIGHT, 1).max())
    if template_end < makespan and peak_retained(chunks, template).max() <= memory:
        actions, makespan = template, template_end
    lower_bound = int(makespan_bound(chunks, times, jobs_of(chunks, times, pp), memory))
    if is_small and makespan - lower_bound > _GAP * lower_bound:
        return SearchResult(*search_small(chunks, times, pp, memory, actions, lower_bound, _EFFORT))
    return SearchResult(actions, makespan, lower_bound)
