"""The default order: critical-path list schedules within the memory of state-aware 1F1B, and a short search from them.

Every stage does next what is more urgent: of a forward and a backward that it knows of, in the order that lets the
later of both be done sooner, as far as their tails say (the rule of one machine with heads and tails: Carlier, EJOR 11,
1982; list schedules by longest paths: Graham, SIAM J. Appl. Math. 17, 1969). So it may wait for what comes soon.
Some simple orders of units are tried, and changed one thing at a time while that may help. The answer is never slower
than state-aware 1F1B (ChunkFlow, arXiv 2503.02356) where that fits, and the same on every machine.

Chunks A and B are standalone, C and D the parts of one sequence; K = 2, time goes right. Capitals are forwards, small
letters backwards. State-aware 1F1B takes 46 for them in the same memory, this 42:

    s0 |AABBCCDD..............aaaa....bbbbddddcccc|
    s1 |..AABBCCDD........aaaa....bbbbddddcccc....|
    s2 |....AABBCCDD..aaaa....bbbbddddcccc........|
    s3 |......AABBaaaaCCDDbbbbddddcccc............|
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.cost.durations import ChunkTimes
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.bounds import Jobs, jobs_of, least_memory
from chunkplan.schedule.holdings import ACTIVATIONS, KV, START, kv_tokens, stage_holdings
from chunkplan.schedule.list_schedule import WHOLE, Limits, list_schedule
from chunkplan.schedule.local_search import HISTORY, Answer, change
from chunkplan.schedule.orders import (
    Order,
    least_forwards,
    limit_forwards,
    most_forwards,
    most_forwards_by_kv,
    units_by_work,
)
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.state_aware_1f1b import state_aware_1f1b
from chunkplan.schedule.tails import write_tails

#: No more memory than state-aware 1F1B takes.
AS_TEMPLATE = -1

#: As many actions are scheduled, at most, in search of a faster order: some milliseconds.
_ACTIONS = 50_000

#: What is as near to the lower bound is good enough: one part in so many.
_GAP = 200


@compiled
def auto(chunks: Chunks, times: ChunkTimes, pp: int, memory_tokens: int, actions: Actions) -> int:
    """Write the fastest schedule found, with whole backwards, into `actions`, and say when it is done.

    `memory_tokens`: tokens whose activations a stage may retain, no fewer than `least_memory`; or `AS_TEMPLATE`. Keys
    and values are held of no more tokens than in state-aware 1F1B and a unit's kept chunks: a group holds its own until
    its last backward, whereas activations go chunk by chunk; and of as many more as it may retain more.
    """
    n = chunks.keeps_activations.size
    kv = kv_tokens(chunks)
    state_aware_1f1b(chunks, pp, actions)
    held = stage_holdings(chunks, kv, actions, 0, 0, pp)  # the first stage runs furthest ahead, so it holds most
    of_template, kv_limit = np.int64(0), np.int64(0)
    for action in range(held.shape[0]):
        of_template = max(of_template, held[action, START, ACTIVATIONS])
        kv_limit = max(kv_limit, held[action, START, KV])
    memory = of_template if memory_tokens == AS_TEMPLATE else np.int64(memory_tokens)
    kv_limit += np.maximum(memory - of_template, 0) + least_memory(chunks)
    best = int(np.max(simulate(actions, times))) if of_template <= memory else int(np.iinfo(np.int64).max)

    jobs = jobs_of(chunks, times, pp)
    bound = int(np.max(jobs.before + jobs.work + jobs.after))
    for stage in range(pp):
        busy = int(np.min(jobs.before[stage]) + np.sum(jobs.work[stage]) + np.min(jobs.after[stage]))
        bound = max(bound, busy)
    good = bound + bound // _GAP
    trial = Actions(
        np.empty_like(actions.ops), np.empty_like(actions.chunk_ids), actions.virtual_stages, actions.stages
    )
    limits = Limits(
        np.empty((pp, n), np.int64),
        np.zeros(pp, np.bool_),
        np.full(pp, memory),
        np.empty(pp, np.int64),
        np.empty((pp, 2 * n), np.int64),
    )
    # One unit after the other always fits.
    answer, now = Answer(units_by_work(chunks, times, 0), np.zeros(pp, np.int64), np.ones(pp, np.bool_)), best
    num_tried = 0
    for direction in (0, -1, 1):
        for warm_ups in (n, 2):
            if best <= good:
                return best
            ahead = np.minimum(warm_ups * np.arange(pp, 0, -1) - 1, n)
            new = Answer(units_by_work(chunks, times, direction), ahead, np.ones(pp, np.bool_))
            end = _evaluate(chunks, times, jobs, kv, kv_limit, new, now - 1, limits, trial)
            num_tried += 1
            if end >= 0:
                now, answer = end, new
                if end < best:
                    best = end
                    actions.ops[:], actions.chunk_ids[:] = trial.ops, trial.chunk_ids
    history = np.full(HISTORY, now)
    state = 1
    while best > good and num_tried * actions.ops.size < _ACTIONS:
        turn = num_tried % HISTORY
        order = Order(answer.order.forwards.copy(), answer.order.backwards.copy())
        new = Answer(order, answer.ahead.copy(), answer.forward_first.copy())
        state = change(chunks.group_id, new, state)
        end = _evaluate(chunks, times, jobs, kv, kv_limit, new, max(now, history[turn]), limits, trial)
        num_tried += 1
        if end >= 0:
            now, answer = end, new
            if end < best:
                best = end
                actions.ops[:], actions.chunk_ids[:] = trial.ops, trial.chunk_ids
        history[turn] = min(history[turn], now)
    return best


@compiled
def _evaluate(
    chunks: Chunks,
    times: ChunkTimes,
    jobs: Jobs,
    kv: Int64Array,
    kv_limit: int,
    answer: Answer,
    most_end: int,
    limits: Limits,
    actions: Actions,
) -> int:
    """When the schedule is done; -1 where that is after `most_end`, or where more memory would be needed."""
    order = answer.order
    least, most = least_forwards(order), most_forwards(chunks, order, limits.memory[0])
    most = np.minimum(most, most_forwards_by_kv(chunks, order, kv, kv_limit))
    if np.any(most < least):
        return -1
    limits.forward_first[:] = answer.forward_first
    for stage in range(limits.memory.size):
        limits.forwards[stage] = limit_forwards(least, most, answer.ahead[stage])
        limits.idle[stage] = most_end - np.sum(jobs.work[stage]) - np.min(jobs.after[stage])
    if write_tails(chunks, times, jobs, order, limits.forwards, limits.tails) > most_end:
        return -1
    return list_schedule(chunks, times, order, limits, WHOLE, actions)
