"""Local search over the orders of forwards and backwards of a rank's chunks, and how far stages run ahead."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.compiled import compiled, copy_to
from chunkplan.cost.durations import ChunkTimes
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.bounds import Jobs, jobs_of, makespan_bound
from chunkplan.schedule.list_schedule import WHOLE, Limits, list_schedule
from chunkplan.schedule.orders import Order, least_forwards, limit_forwards, most_forwards, units_by_work

#: Late acceptance compares with the point of so many tries before.
HISTORY = 50


class SearchPoint(NamedTuple):
    """The input of `list_schedule`: orders, and how far stages run ahead.

    `ahead` int64 [pp]: how many more forwards a stage may do than its backwards need; `forward_first` bool [pp].
    """

    order: Order
    ahead: Int64Array
    forward_first: BoolArray


@compiled
def local_search(chunks: Chunks, times: ChunkTimes, pp: int, memory: int, effort: int, actions: Actions) -> int:
    """Write the fastest schedule found, with whole backwards, into `actions`, and return its end.

    Every point is an order of forwards, one of backwards and, for every stage, how far forwards may run ahead and
    whether they go first; `list_schedule` makes a schedule of it. Starts from the best of some simple ones and changes
    one thing at a time, by late acceptance (Burke and Bykov, EJOR 258, 2017): what is no slower than the point some
    tries ago is accepted. Ends at the lower bound, or when `effort` actions have been scheduled.

    `memory`: tokens whose activations a stage may retain, no fewer than `least_memory`.
    """
    n = chunks.keeps_activations.size
    jobs = jobs_of(chunks, times, pp)
    bound = makespan_bound(chunks, times, jobs, memory)
    trial = Actions(
        np.empty_like(actions.ops), np.empty_like(actions.chunk_ids), actions.virtual_stages, actions.stages
    )
    limits = Limits(
        np.empty((pp, n), np.int64),
        np.zeros(pp, np.bool_),
        np.full(pp, memory),
        np.empty(pp, np.int64),
        np.empty((pp, 0), np.int64),
    )

    best = int(np.iinfo(np.int64).max)
    point = SearchPoint(units_by_work(chunks, times, 0), np.full(pp, n), np.zeros(pp, np.bool_))
    num_tried = 0
    for direction in (0, 1, -1):
        for warm_ups in (1, 2, n):
            for forward_first in (False, True):
                ahead = np.minimum(warm_ups * np.arange(pp, 0, -1) - 1, n)
                new = SearchPoint(units_by_work(chunks, times, direction), ahead, np.full(pp, forward_first))
                end = _evaluate(chunks, times, new, best - 1, jobs, limits, trial)
                num_tried += 1
                if end >= 0:
                    best, point = end, new
                    actions.ops[:], actions.chunk_ids[:] = trial.ops, trial.chunk_ids

    now, history = best, np.full(HISTORY, best)
    state = 1
    while best > bound and num_tried * actions.ops.size < effort:
        turn = num_tried % HISTORY
        order = Order(point.order.forwards.copy(), point.order.backwards.copy())
        new = SearchPoint(order, point.ahead.copy(), point.forward_first.copy())
        state = mutate(chunks.group_id, new, state)
        end = _evaluate(chunks, times, new, max(now, history[turn]), jobs, limits, trial)
        num_tried += 1
        if end >= 0:
            now, point = end, new
            if end < best:
                best = end
                actions.ops[:], actions.chunk_ids[:] = trial.ops, trial.chunk_ids
        history[turn] = min(history[turn], now)
    return best


@compiled
def _evaluate(
    chunks: Chunks,
    times: ChunkTimes,
    point: SearchPoint,
    most_end: int,
    jobs: Jobs,
    limits: Limits,
    actions: Actions,
) -> int:
    """End of the schedule of a search point; -1 if later than `most_end`, or if it needs more memory."""
    least, most = least_forwards(point.order), most_forwards(chunks, point.order, limits.memory[0])
    if np.any(most < least):
        return -1
    copy_to(limits.forward_first, point.forward_first)
    for stage in range(limits.memory.size):
        limits.forwards[stage] = limit_forwards(least, most, point.ahead[stage])
        limits.idle[stage] = most_end - np.sum(jobs.work[stage]) - np.min(jobs.after[stage])
    return list_schedule(chunks, times, point.order, limits, WHOLE, actions)


@compiled
def mutate(group_id: Int32Array, point: SearchPoint, state: int) -> int:
    """Apply one random change to `point`; returns the state of the random numbers."""
    n, pp = group_id.size, point.ahead.size
    forwards, backwards = point.order.forwards, point.order.backwards
    state, what = draw(state, 8)
    state, chunk = draw(state, n)
    state, other = draw(state, n + 1)
    state, another = draw(state, n + 1)
    state, doublings = draw(state, 6)
    state, sign = draw(state, 2)
    step, distance = 2 * sign - 1, 1 << doublings
    if what == 0 and doublings == 0:
        point.forward_first[other % pp] ^= True
    elif what == 0:
        point.ahead[other % pp] = min(max(point.ahead[other % pp] + step * distance // 2, 0), n)
    elif what <= 3:
        if what != 1:
            _shift(forwards, chunk, step, distance, group_id)
        if what != 2:
            _shift(backwards, chunk, step, distance, group_id)
    else:
        moved = _some_units(group_id, forwards, chunk, distance)
        if what != 4:
            _move(forwards, moved, other)
        if what != 5:
            _move(backwards, moved, other if what == 6 else another)
    return state


@compiled
def _shift(order: Int64Array, chunk: int, step: int, distance: int, group_id: Int32Array) -> None:
    """Move `chunk` on, `distance` times by `step` places, but not past its own group."""
    place = 0
    while order[place] != chunk:
        place += 1
    for _ in range(distance):
        neighbour = place + step
        if not 0 <= neighbour < order.size or group_id[order[neighbour]] == group_id[chunk] >= 0:
            return
        order[place], order[neighbour] = order[neighbour], order[place]
        place = neighbour


@compiled
def _some_units(group_id: Int32Array, forwards: Int64Array, chunk: int, number: int) -> BoolArray:
    """The group of `chunk`, or as many as `number` standalone chunks that are forwarded from `chunk` on: bool [n]."""
    if group_id[chunk] >= 0:
        chosen: BoolArray = group_id == group_id[chunk]
        return chosen
    chosen = np.zeros(group_id.size, np.bool_)
    place = 0
    while forwards[place] != chunk:
        place += 1
    while place < forwards.size and number > 0:
        if group_id[forwards[place]] < 0:
            chosen[forwards[place]] = True
            number -= 1
        place += 1
    return chosen


@compiled
def _move(order: Int64Array, moved: BoolArray, before: int) -> None:
    """Move these chunks, in their order, to before the chunk `before`; to the end where there is none such."""
    chosen, rest = order[moved[order]], order[~moved[order]]
    place = 0
    while place < rest.size and rest[place] != before:
        place += 1
    copy_to(order[:place], rest[:place])
    copy_to(order[place : place + chosen.size], chosen)
    copy_to(order[place + chosen.size :], rest[place:])


@compiled
def draw(state: int, bound: int) -> tuple[int, int]:
    """The next state of the minimal standard generator (Park and Miller 1988), and a number below `bound`."""
    state = state * 48271 % 2147483647
    return state, state % bound
