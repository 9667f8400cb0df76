"""Critical-path list schedules within the memory of state-aware 1F1B, and a short search from them: `auto`, and with
split backwards `zero-bubble`.

Every stage runs the more urgent of its next forward and backward first: the order in which the later of both ends
sooner by their tails (the rule of one machine with heads and tails: Carlier, EJOR 11, 1982; list schedules by longest
paths: Graham, SIAM J. Appl. Math. 17, 1969). So it may wait for an action that is due soon. Some simple orders of units
are tried, and changed one thing at a time while that may help. The result is never slower than state-aware 1F1B
(ChunkFlow, arXiv 2503.02356) where that fits, and the same on every machine. Ranks that share chunks are scheduled
together.

Chunks A and B are standalone, C and D the parts of one sequence; K = 2, time goes right. Capitals are forwards, small
letters backwards. State-aware 1F1B takes 46 for them in the same memory, this 42:

    s0 |AABBCCDD..............aaaa....bbbbddddcccc|
    s1 |..AABBCCDD........aaaa....bbbbddddcccc....|
    s2 |....AABBCCDD..aaaa....bbbbddddcccc........|
    s3 |......AABBaaaaCCDDbbbbddddcccc............|

With split backwards (zero bubble: Qi et al., arXiv 2401.10241) stages wait for the gradients of inputs alone; those of
weights (w) fill the bubbles and the end. A chunk's activations count as held until its weight half, so that this needs
no more memory either, and takes 32:

    s0 |AABBCCDD........aawwbbwwddccwwww|
    s1 |..AABBCCDD....aawwbbwwddccwwww..|
    s2 |....AABBCCDDaawwbbwwddccwwww....|
    s3 |......AABBaaCCbbDDddccwwwwwwww..|
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled, copy_to
from chunkplan.cost.durations import ChunkTimes
from chunkplan.layers import STRAIGHT
from chunkplan.planfile.chunks import Chunks, chunks_of_rank
from chunkplan.schedule.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    RECOMPUTE,
    Actions,
    empty_actions,
    times_of_rank,
)
from chunkplan.schedule.bounds import Jobs, jobs_of, least_memory
from chunkplan.schedule.holdings import KV, START, kv_tokens, peak_retained, stage_holdings
from chunkplan.schedule.list_schedule import WHOLE, Limits, list_schedule
from chunkplan.schedule.local_search import HISTORY, SearchPoint, draw, mutate
from chunkplan.schedule.orders import (
    Order,
    least_forwards,
    limit_forwards,
    most_forwards,
    most_forwards_by_kv,
    units_by_work,
)
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.templates import TEMPLATES, follow_template

# Tails: the least time from a job to the end of all, by which one job is more urgent than another.


@compiled
def write_tails(
    chunks: Chunks, times: ChunkTimes, jobs: Jobs, order: Order, rank: int, forwards: Int64Array, tails: Int64Array
) -> int:
    """Write the tail of every job of a rank into `tails` int64 [pp, 2 n], and return the longest one.

    A tail is the longest path from the start of a job to the end of all: over links, from the last stage's forward of a
    chunk to its backward, along both orders, and from a backward to the first forward that has to wait for it.
    No schedule with these orders and limits is done before the longest tail is.

    `jobs`, `order` (the chunks of one rank after another) and `forwards` int64 [pp, n], the most forwards of the rank
    before each of its backwards in order, no fewer than `least_forwards`, are those of all ranks of `chunks`.
    """
    n, pp = order.forwards.size, forwards.shape[0]
    base, end = chunks.rank_chunks[rank], chunks.rank_chunks[rank + 1]
    backward_place = np.empty(n, np.int64)
    for place in range(base, end):
        backward_place[order.backwards[place]] = place
    # The places in both orders that are next, from the last one down.
    forward, backward = np.full(pp, end - 1), np.full(pp, end - 1)
    longest, moving = np.int64(0), True
    while moving:
        moving = False
        for stage in range(pp):
            while backward[stage] >= base:
                place = backward[stage]
                chunk, limit = order.backwards[place], base + forwards[stage, place]
                is_limit = place + 1 < end and limit < end
                if (stage > 0 and backward[stage - 1] >= place) or (is_limit and forward[stage] >= limit):
                    break
                tail = np.int64(0)
                if stage > 0:
                    tail = _from_arrival(chunks, times, tails, stage - 1, chunk) + times.link[chunk]
                if place + 1 < end:
                    tail = max(tail, tails[stage, n + order.backwards[place + 1]])
                if is_limit:
                    tail = max(tail, tails[stage, order.forwards[limit]])
                tails[stage, n + chunk] = tail + jobs.work[stage, n + chunk]
                longest = max(longest, tails[stage, n + chunk])
                backward[stage] -= 1
                moving = True
        for stage in range(pp - 1, -1, -1):
            while forward[stage] >= base:
                place = forward[stage]
                chunk = order.forwards[place]
                if stage + 1 < pp:
                    if forward[stage + 1] >= place:
                        break
                    tail = tails[stage + 1, chunk] + times.link[chunk]
                else:
                    if backward[stage] >= backward_place[chunk]:
                        break
                    tail = tails[stage, n + chunk]
                if place + 1 < end:
                    tail = max(tail, tails[stage, order.forwards[place + 1]])
                tails[stage, chunk] = tail + jobs.work[stage, chunk]
                longest = max(longest, tails[stage, chunk])
                forward[stage] -= 1
                moving = True
    return int(longest)


@compiled
def _from_arrival(chunks: Chunks, times: ChunkTimes, tails: Int64Array, stage: int, chunk: int) -> int:
    """The time from the arrival of a chunk's gradient at `stage`, which has recomputed it by then, to the end."""
    tail = tails[stage, chunks.keeps_activations.size + chunk]
    return int(tail if chunks.keeps_activations[chunk] else tail - times.durations[RECOMPUTE, stage, chunk])


# `auto`, and `zero-bubble`, of all ranks of a step: effort goes where the step can be done sooner.


#: Where state-aware 1F1B is as near to the lower bound of a step, one part in so many, nothing else is tried.
_NEAR = 50


@compiled
def auto_step(chunks: Chunks, times: ChunkTimes, pp: int, memory_tokens: int, splits_backward: bool) -> Actions:
    """The order of all ranks of a step, [num_ranks * pp] stages: the rank that is done last counts.

    Ranks that share chunks are scheduled together. Others are one by one, the slowest of state-aware 1F1B first: none
    need be done sooner than those before it could be, or than the bound of the step, and of those that are alike one is
    looked at. Groups of different ranks have different numbers.
    """
    actions, _, _, ends = baseline_1f1b(chunks, times, pp, memory_tokens, splits_backward)
    target = order_bound(chunks, times, pp, splits_backward)
    if np.max(ends) <= target + target // _NEAR:
        return actions
    if np.any(chunks.cp_size > 1):
        return auto(chunks, times, pp, memory_tokens, 0, splits_backward)[0]
    slowest_first = np.argsort(-ends, kind="mergesort")
    for place, rank in enumerate(slowest_first):
        if ends[rank] <= target:
            break
        twin = _identical_rank(chunks, times, rank, slowest_first[:place])
        to = slice(actions.stages[rank * pp], actions.stages[(rank + 1) * pp])
        if twin >= 0:
            of = slice(actions.stages[twin * pp], actions.stages[(twin + 1) * pp])
            copy_to(actions.ops[to], actions.ops[of])
            copy_to(actions.chunk_ids[to], actions.chunk_ids[of])
            continue
        rank_chunks, rank_times = chunks_of_rank(chunks, rank), times_of_rank(chunks, times, rank)
        found, end = auto(rank_chunks, rank_times, pp, memory_tokens, target, splits_backward)
        copy_to(actions.ops[to], found.ops)
        copy_to(actions.chunk_ids[to], found.chunk_ids)
        target = max(target, end)
    return actions


@compiled
def _identical_rank(chunks: Chunks, times: ChunkTimes, rank: int, others: Int64Array) -> int:
    """The first of some ranks whose chunks have the same kinds and times as those of `rank`, or -1."""
    start, stop = chunks.rank_chunks[rank], chunks.rank_chunks[rank + 1]
    for other in others:
        shift = chunks.rank_chunks[other] - start
        is_twin = chunks.rank_chunks[other + 1] - shift == stop
        chunk = start
        while is_twin and chunk < stop:
            twin = chunk + shift
            is_twin = chunks.num_tokens[chunk] == chunks.num_tokens[twin]
            is_twin &= chunks.keeps_activations[chunk] == chunks.keeps_activations[twin]
            is_twin &= (chunks.group_id[chunk] < 0) == (chunks.group_id[twin] < 0)
            if chunk > start and chunks.group_id[chunk] >= 0:
                same = chunks.group_id[chunk] == chunks.group_id[chunk - 1]
                is_twin &= same == (chunks.group_id[twin] == chunks.group_id[twin - 1])
            is_twin &= np.all(times.durations[:, :, chunk] == times.durations[:, :, twin])
            chunk += 1
        if is_twin:
            return int(other)
    return -1


#: The template of state-aware 1F1B.
_AHEAD = TEMPLATES["1f1b"]

#: No more memory than state-aware 1F1B takes.
BASELINE_MEMORY = -1

#: As many actions are scheduled, at most, in search of a faster order: a millisecond or two.
_ACTIONS = 8_000

#: So many changes in a row that made nothing faster are target: of few chunks everything has been tried by then.
_MAX_FUTILE = 128

#: Of ranks with thousands of chunks fewer simple orders are tried, for as many actions, but two at least.
_FIRST_ACTIONS = 60_000

#: By how much of its own time, in per cent, a weight half may delay what comes next: what is tried.
OVERRUNS = np.array([50, 100])

#: A result this close to the lower bound, one part in so many, ends the search.
_GAP = 200


@compiled
def auto(
    chunks: Chunks, times: ChunkTimes, pp: int, memory_tokens: int, target: int, splits_backward: bool
) -> tuple[Actions, int]:
    """The fastest schedule found, with whole backwards or all of them split, and when it is done.

    Args:
        chunks: of one rank, or of all ranks of a step, some of which they share. Then groups of different ranks have
            different numbers, and these ranks are scheduled together.
        memory_tokens: tokens whose activations a stage may retain, no fewer than `least_memory`; or `BASELINE_MEMORY`.
            Keys and values are held for no more tokens than in state-aware 1F1B plus a unit's kept chunks (a group
            holds its own until its last backward, activations go chunk by chunk), plus any extra retained tokens.
        target: an end time that need not be improved on.
    """
    n, num_rows = chunks.keeps_activations.size, (chunks.rank_chunks.size - 1) * pp
    if not n:
        return empty_actions(chunks.keeps_activations, pp, pp, splits_backward), 0
    actions, memory, kv_limit, ends = baseline_1f1b(chunks, times, pp, memory_tokens, splits_backward)
    best = int(np.max(ends))
    jobs = jobs_of(chunks, times, pp, BACKWARD_INPUT if splits_backward else BACKWARD)
    work, after, bound = _row_bounds(chunks, times, jobs, pp, splits_backward)
    good = max(bound + bound // _GAP, target)
    trial = Actions(
        np.empty_like(actions.ops), np.empty_like(actions.chunk_ids), actions.virtual_stages, actions.stages
    )
    limits = Limits(
        np.empty((pp, n), np.int64),
        np.zeros(num_rows, np.bool_),
        np.full(num_rows, memory),
        np.empty(num_rows, np.int64),
        np.empty((pp, 2 * n), np.int64),
    )
    kv = kv_tokens(chunks)
    # One unit after the other always fits.
    point = SearchPoint(units_by_work(chunks, times, 0), np.zeros(num_rows, np.int64), np.ones(num_rows, np.bool_))
    now, overrun = best, OVERRUNS[0] if splits_backward else WHOLE
    num_tried = 0
    for direction in (0, -1, 1):
        for warm_ups in (n, 2):
            for index in range(OVERRUNS.size if splits_backward else 1):
                if best <= good or (num_tried > 1 and num_tried * actions.ops.size > _FIRST_ACTIONS):
                    return actions, best
                ahead = np.minimum(warm_ups * (pp - np.arange(num_rows) % pp) - 1, n)
                new = SearchPoint(units_by_work(chunks, times, direction), ahead, np.ones(num_rows, np.bool_))
                copy_to(limits.idle, now - 1 - work - after)
                new_overrun = OVERRUNS[index] if splits_backward else WHOLE
                end = _evaluate(chunks, times, jobs, kv, kv_limit, new, now - 1, new_overrun, limits, trial)
                num_tried += 1
                if end >= 0:
                    now, point, overrun = end, new, new_overrun
                    if end < best:
                        best = end
                        copy_to(actions.ops, trial.ops)
                        copy_to(actions.chunk_ids, trial.chunk_ids)
    history = np.full(HISTORY, now)
    state, num_futile = 1, 0 if n > 1 else _MAX_FUTILE  # of one chunk there is one order
    while best > good and num_futile < _MAX_FUTILE and num_tried * actions.ops.size < _ACTIONS:
        turn = num_tried % HISTORY
        most_end = max(now, history[turn])
        num_futile += 1
        new, is_other, state = _neighbour(chunks, point, pp, state)
        if not is_other:
            continue
        copy_to(limits.idle, most_end - work - after)
        end = _evaluate(chunks, times, jobs, kv, kv_limit, new, most_end, overrun, limits, trial)
        num_tried += 1
        if end >= 0:
            now, point = end, new
            if end < best:
                best, num_futile = end, 0
                copy_to(actions.ops, trial.ops)
                copy_to(actions.chunk_ids, trial.chunk_ids)
        history[turn] = min(history[turn], now)
    return actions, best


@compiled
def order_bound(chunks: Chunks, times: ChunkTimes, pp: int, splits_backward: bool) -> int:
    """A lower bound on the end of any order of the chunks, whatever the memory."""
    jobs = jobs_of(chunks, times, pp, BACKWARD_INPUT if splits_backward else BACKWARD)
    return _row_bounds(chunks, times, jobs, pp, splits_backward)[2]


@compiled
def baseline_1f1b(
    chunks: Chunks, times: ChunkTimes, pp: int, memory_tokens: int, splits_backward: bool
) -> tuple[Actions, int, int, Int64Array]:
    """State-aware 1F1B; the tokens whose activations, and whose keys and values, may be held; and when each rank is
    done, [num_ranks]: later than anything where one holds too much.
    """
    num_ranks = chunks.rank_chunks.size - 1
    actions = follow_template(chunks, times, pp, _AHEAD)
    if splits_backward:
        actions = _split(actions)
    ends = simulate(chunks, actions, times, pp, STRAIGHT, num_ranks)
    kv = kv_tokens(chunks)
    baseline_tokens, kv_limit = np.int64(np.max(peak_retained(chunks, actions))), np.int64(0)
    for rank in range(num_ranks):
        held = stage_holdings(chunks, kv, actions, rank, 0, pp)  # the first stage runs furthest ahead: it holds most
        for action in range(held.shape[0]):
            kv_limit = max(kv_limit, held[action, START, KV])
    memory = baseline_tokens if memory_tokens == BASELINE_MEMORY else np.int64(memory_tokens)
    kv_limit += np.maximum(memory - baseline_tokens, 0) + least_memory(chunks)
    rank_ends = np.full(num_ranks, np.iinfo(np.int64).max)
    if baseline_tokens <= memory:
        for rank in range(num_ranks):
            own = ends[actions.stages[rank * pp] : actions.stages[(rank + 1) * pp]]
            rank_ends[rank] = np.max(own) if own.size else 0
    return actions, int(memory), int(kv_limit), rank_ends


@compiled
def _split(whole: Actions) -> Actions:
    """The same actions with both halves of a backward one after the other."""
    is_backward = whole.ops == BACKWARD
    before = np.zeros(whole.ops.size + 1, np.int64)  # how many backwards come before each action
    copy_to(before[1:], np.cumsum(is_backward))
    place = np.arange(whole.ops.size) + before[:-1]
    size = whole.ops.size + before[-1]
    ops, chunk_ids = np.empty(size, np.int8), np.empty(size, np.int32)
    for old, new in enumerate(place):
        ops[new], chunk_ids[new] = whole.ops[old], whole.chunk_ids[old]
    for action in np.flatnonzero(is_backward):
        ops[place[action]], ops[place[action] + 1] = BACKWARD_INPUT, BACKWARD_WEIGHT
        chunk_ids[place[action] + 1] = whole.chunk_ids[action]
    return Actions(ops, chunk_ids, np.zeros(size, np.int32), whole.stages + before[whole.stages])


@compiled
def _row_bounds(
    chunks: Chunks, times: ChunkTimes, jobs: Jobs, pp: int, splits_backward: bool
) -> tuple[Int64Array, Int64Array, int]:
    """Work of each stage of each rank, the least time after it, int64 [rows], and a lower bound."""
    n, num_ranks = chunks.keeps_activations.size, chunks.rank_chunks.size - 1
    work, after = np.zeros(num_ranks * pp, np.int64), np.zeros(num_ranks * pp, np.int64)
    bound = int(np.max(jobs.before + jobs.work + jobs.after)) if n else 0
    for rank in range(num_ranks):
        base, end = chunks.rank_chunks[rank], chunks.rank_chunks[rank + 1]
        if base == end:
            continue
        for stage in range(pp):
            row = rank * pp + stage
            work[row] = np.sum(jobs.work[stage, base:end]) + np.sum(jobs.work[stage, n + base : n + end])
            if splits_backward:  # which a stage may end with
                work[row] += np.sum(times.durations[BACKWARD_WEIGHT, stage, base:end])
            else:
                after[row] = np.min(jobs.after[stage, n + base : n + end])
            bound = max(bound, int(np.min(jobs.before[stage, base:end]) + work[row] + after[row]))
    return work, after, bound


@compiled
def _neighbour(chunks: Chunks, point: SearchPoint, pp: int, state: int) -> tuple[SearchPoint, bool, int]:
    """A search point with one random change on one rank, whether it differs, and the state of the random numbers.

    Shared chunks stay.
    """
    order = Order(point.order.forwards.copy(), point.order.backwards.copy())
    new = SearchPoint(order, point.ahead.copy(), point.forward_first.copy())
    state, rank = draw(state, chunks.rank_chunks.size - 1)
    base, end = chunks.rank_chunks[rank], chunks.rank_chunks[rank + 1]
    if base == end:
        return new, False, state
    rows = slice(rank * pp, (rank + 1) * pp)
    own = SearchPoint(
        Order(order.forwards[base:end] - base, order.backwards[base:end] - base),
        new.ahead[rows],
        new.forward_first[rows],
    )
    state = mutate(chunks.group_id[base:end], own, state)
    is_other = np.any(new.ahead[rows] != point.ahead[rows])
    is_other |= np.any(new.forward_first[rows] != point.forward_first[rows])
    stop = base + np.sum(chunks.cp_size[base:end] > 1)
    forwards, backwards = own.order.forwards + base, own.order.backwards + base
    if np.all(forwards[: stop - base] == order.forwards[base:stop]) and np.all(
        backwards[: stop - base] == order.backwards[base:stop]
    ):
        is_other |= np.any(forwards != order.forwards[base:end]) or np.any(backwards != order.backwards[base:end])
        order.forwards[base:end], order.backwards[base:end] = forwards, backwards
    return new, bool(is_other), state


@compiled
def _evaluate(
    chunks: Chunks,
    times: ChunkTimes,
    jobs: Jobs,
    kv: Int64Array,
    kv_limit: int,
    point: SearchPoint,
    most_end: int,
    overrun: int,
    limits: Limits,
    actions: Actions,
) -> int:
    """End of the schedule of a search point; -1 if later than `most_end`, or if it needs more memory."""
    copy_to(limits.forward_first, point.forward_first)
    pp = limits.forwards.shape[0]
    for rank in range(chunks.rank_chunks.size - 1):
        base, end = chunks.rank_chunks[rank], chunks.rank_chunks[rank + 1]
        if base == end:
            continue
        order = Order(point.order.forwards[base:end] - base, point.order.backwards[base:end] - base)
        rank_chunks = chunks_of_rank(chunks, rank)
        least, most = least_forwards(order), most_forwards(rank_chunks, order, limits.memory[rank * pp])
        most = np.minimum(most, most_forwards_by_kv(order, kv[:, base:end], kv_limit))
        if np.any(most < least):
            return -1
        for stage in range(pp):
            own = limits.forwards[stage, base:end]
            copy_to(own, limit_forwards(least, most, point.ahead[rank * pp + stage]))
        if write_tails(chunks, times, jobs, point.order, rank, limits.forwards, limits.tails) > most_end:
            return -1
    return list_schedule(chunks, times, point.order, limits, overrun, actions)
