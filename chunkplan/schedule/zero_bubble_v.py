"""Zero-bubble on a V of virtual stages: every stage has two, the second ones in descending order.

The ZB-V schedule of Zero Bubble Pipeline Parallelism (Qi et al., arXiv 2401.10241, section 6) on the chunks of
ChunkFlow (arXiv 2503.02356), which take unequal times and depend on one another. The first and the last model stage
are both on stage 0, so a chunk comes back there without a way over all stages, and stages hold about the same.
Backwards are split as in `zero_bubble`, groups backward in descending order and hold no more chunks than they keep.

Chunks A and B are standalone, C and D the parts of one sequence; K = 2, time goes right. Capitals are forwards, small
letters the halves of backwards that the model stage before waits for, w those of weights:

    s0 |AABBCCDD......AAaaBBbbCCwwDDddaaccbbwwwwwwddwwccwwwwww|
    s1 |..AABBCCDD..AA..BBaaCCbbDDwwaaddbbccwwwwddwwccwwwwwwww|
    s2 |....AABBCCAADDBB..CCaaDDbbaawwbbddwwccddwwccwwwwwwwwww|
    s3 |......AAAABBBBCCCCDDDDaaaabbbbwwwwddddccccwwwwwwwwwwww|
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled, copy_to
from chunkplan.cost.durations import ChunkTimes
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FORWARD_KV,
    RECOMPUTE,
    Actions,
    empty_actions,
)
from chunkplan.schedule.holdings import peak_retained
from chunkplan.schedule.list_schedule import ADDED, next_weight, units
from chunkplan.schedule.orders import Order, least_forwards, units_by_work
from chunkplan.schedule.templates import state_aware_1f1b

#: Later than any time, and far enough from the largest integer to be added to.
_NEVER = 2**62


class _Rule(NamedTuple):
    """A rule to try: forwards that a model stage may run beyond those that its next backward and those behind it in
    flight need; the virtual stage whose backward goes first when both could start; the most delay of the next action by
    a weight half, in per cent of its time."""

    ahead: int
    first_backward: int
    overrun: int


class _Needs(NamedTuple):
    """Needs of backwards in order: the `least` forwards before each [n + 1], and tokens recomputed for it [n].

    `held` [n + 1]: tokens whose activations the first so many forwards keep, of which the first so many backwards
    release `released` [n + 1].
    """

    least: Int64Array
    recomputed: Int64Array
    held: Int64Array
    released: Int64Array


#: Of ranks with thousands of chunks fewer rules are tried, for as many actions, but two at least.
_MOST_ACTIONS = 60_000


@compiled
def zero_bubble_v(chunks: Chunks, times: ChunkTimes, pp: int, actions: Actions) -> None:
    """Write the actions of all stages: the fastest of some list schedules, which take units in different orders.

    No stage retains more tokens than the stage of state-aware 1F1B that retains most, a virtual stage as half of one.
    """
    n = chunks.keeps_activations.size
    whole = empty_actions(chunks.keeps_activations, pp, pp, False)
    state_aware_1f1b(chunks, times, pp, 1, 1, whole)
    memory = 2 * int(np.max(peak_retained(chunks, whole)))
    trial = Actions(
        np.empty_like(actions.ops),
        np.empty_like(actions.chunk_ids),
        np.empty_like(actions.virtual_stages),
        actions.stages,
    )
    fastest, num_tried = _NEVER, 0
    for direction in (0, 1, -1):
        order = units_by_work(chunks, times, direction)
        # Of many rules that were tried on random chunks, those that together come nearest to the best of all.
        for rule in (_Rule(n, 0, 100), _Rule(n, 0, 50), _Rule(2, 1, 75), _Rule(n, 1, 0), _Rule(n, 1, 50)):
            if num_tried > 1 and num_tried * actions.ops.size > _MOST_ACTIONS:
                return
            end = _list_schedule(chunks, times, order, rule, memory, trial)
            num_tried += 1
            if end < fastest:
                fastest = end
                copy_to(actions.ops, trial.ops)
                copy_to(actions.chunk_ids, trial.chunk_ids)
                copy_to(actions.virtual_stages, trial.virtual_stages)


@compiled
def _list_schedule(chunks: Chunks, times: ChunkTimes, order: Order, rule: _Rule, memory: int, actions: Actions) -> int:
    """Fill `actions` and return the makespan; `memory` is for virtual stages, each of which counts by itself.

    The action that can start first is run first; at the same time backwards before forwards, and of these second
    virtual stages before first ones. Weight halves fill bubbles, as in `list_schedule`. Forwards leave the room that
    backwards need (`_leaves_room`), so that stages never deadlock.
    """
    # A name for every array, and few calls: handing them on would take several times longer than the work itself.
    n, pp = chunks.num_tokens.size, actions.stages.size - 1
    keeps, num_tokens, durations, link = chunks.keeps_activations, chunks.num_tokens, times.durations, times.link
    forwards, backwards = np.append(order.forwards, n), np.append(order.backwards, n)  # chunk n is never ready
    (head, num_kept), needs = units(chunks), _needs(chunks, order)
    clock, retained, is_weighted = np.zeros(pp, np.int64), np.zeros(pp, np.int64), np.zeros((2 * pp, n), np.bool_)
    forwarded, backwarded, weighted = np.zeros((3, 2 * pp), np.int64)
    holders, ready_at = np.zeros((2 * pp, n), np.int64), np.full((2, 2 * pp, n + 1), _NEVER)
    ready_at[0, 0, :n] = 0
    start, op, following, weight = np.empty((4, pp), np.int64)  # what each stage does next, and on which model stage
    action, changed = actions.stages[:-1].copy(), range(pp)
    while True:
        for stage in changed:
            now, room = clock[stage], memory - retained[stage]
            first, second = stage, 2 * pp - 1 - stage  # its model stages
            start[stage], op[stage], releasing, must_release = _NEVER, BACKWARD_WEIGHT, -1, -1
            for place in (second, first) if rule.first_backward else (first, second):
                chunk = backwards[backwarded[place]]
                ready = ready_at[1, place, chunk]
                if ready < _NEVER and not keeps[chunk]:
                    ready = max(ready - durations[RECOMPUTE, place, chunk], 0) if num_tokens[chunk] <= room else _NEVER
                    if holders[place, head[chunk]] >= num_kept[head[chunk]]:
                        ready, releasing, must_release = _NEVER, place, head[chunk]
                if max(now, ready) < start[stage]:
                    start[stage], op[stage], following[stage] = max(now, ready), BACKWARD_INPUT, place
            for place in (second, first):
                chunk, other, done = forwards[forwarded[place]], first + second - place, backwarded[place]
                ready = max(now, ready_at[0, place, chunk])
                if ready >= start[stage] or (keeps[chunk] and num_tokens[chunk] > room):
                    continue
                is_ahead = forwarded[place] >= max(needs.least[done], done + 1) + 2 * pp - 1 - place + rule.ahead
                counts = forwarded[place] + 1, forwarded[other], done, backwarded[other]
                if not is_ahead and _leaves_room(needs, counts, memory):
                    start[stage], op[stage], following[stage] = ready, FORWARD, place
            for place in (first, second):
                if start[stage] <= now or weighted[place] == backwarded[place] or releasing not in (-1, place):
                    continue
                index = next_weight(is_weighted[place], weighted[place], backwards, head, must_release)
                duration = durations[BACKWARD_WEIGHT, place, backwards[index]]
                if start[stage] == _NEVER or 100 * (now + duration - start[stage]) <= rule.overrun * duration:
                    start[stage], op[stage], following[stage], weight[stage] = now, BACKWARD_WEIGHT, place, index

        stage = int(np.argmin(start))
        if start[stage] == _NEVER:
            return int(np.max(clock))
        place, done_op, clock[stage] = following[stage], op[stage], start[stage]
        if done_op == FORWARD:
            chunk = forwards[forwarded[place]]
            done_op = FORWARD if keeps[chunk] else FORWARD_KV
            forwarded[place] += 1
        elif done_op == BACKWARD_INPUT:
            chunk = backwards[backwarded[place]]
            backwarded[place] += 1
        else:
            chunk = backwards[weight[stage]]
            is_weighted[place, weight[stage]] = True
            weighted[place] = next_weight(is_weighted[place], weighted[place], backwards, head, -1)
        is_recomputed = done_op == BACKWARD_INPUT and not keeps[chunk]
        for part in range(1 - is_recomputed, 2):
            each = done_op if part else RECOMPUTE
            actions.ops[action[stage]], actions.chunk_ids[action[stage]] = each, chunk
            actions.virtual_stages[action[stage]] = place // pp
            action[stage] += 1
            clock[stage] += durations[each, place, chunk]
            retained[stage] += ADDED[each] * num_tokens[chunk]
            holders[place, head[chunk]] += ADDED[each]
        if op[stage] != BACKWARD_WEIGHT:
            _send(ready_at, op[stage] == FORWARD, place, chunk, clock[stage], link[chunk])
        changed = range(max(stage - 1, 0), min(stage + 2, pp))


@compiled
def _send(ready_at: Int64Array, is_forward: bool, place: int, chunk: int, now: int, link: int) -> None:
    """Record when a chunk done on a model stage arrives at the next one; there is no link where the V turns."""
    last = ready_at.shape[1] - 1
    if is_forward and place == last:
        ready_at[1, place, chunk] = now
    elif is_forward:
        ready_at[0, place + 1, chunk] = now + (0 if place == last // 2 else link)
    elif place > 0:
        ready_at[1, place - 1, chunk] = now + (0 if place - 1 == last // 2 else link)


@compiled
def _leaves_room(needs: _Needs, counts: tuple[int, int, int, int], memory: int) -> bool:
    """True if a stage has room for all remaining actions after so many forwards and backwards of its two virtual
    stages.

    It has where that is done with one backward after another, each on both virtual stages and with no more forwards
    than it needs. From the first backward on that needs all forwards that are done, both virtual stages are in step,
    and need no more room than state-aware 1F1B.
    """
    forwarded, other_forwarded, backwarded, other_backwarded = counts
    for index in range(min(backwarded, other_backwarded), needs.recomputed.size):
        least = needs.least[index]
        held = needs.held[max(forwarded, least)] - needs.released[max(backwarded, index)]
        held += needs.held[max(other_forwarded, least)] - needs.released[max(other_backwarded, index)]
        if held + needs.recomputed[index] > memory:
            return False
        if least >= max(forwarded, other_forwarded):
            return True
    return True


@compiled
def _needs(chunks: Chunks, order: Order) -> _Needs:
    n, keeps = order.forwards.size, chunks.keeps_activations
    recomputed, held, released = np.empty(n, np.int64), np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
    for index in range(n):
        chunk = order.forwards[index]
        held[index + 1] = held[index] + (chunks.num_tokens[chunk] if keeps[chunk] else 0)
        chunk = order.backwards[index]
        recomputed[index] = 0 if keeps[chunk] else chunks.num_tokens[chunk]
        released[index + 1] = released[index] + chunks.num_tokens[chunk] - recomputed[index]
    return _Needs(np.append(least_forwards(order), n), recomputed, held, released)
