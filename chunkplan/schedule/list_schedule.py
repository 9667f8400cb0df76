"""A list scheduler for pipelines: of all that could be done next, do what can start first.

The order of forwards and that of backwards are given, the same for all stages. How they interleave on each stage is
decided here, under limits on how far forwards run ahead of backwards and on the tokens whose activations a stage
retains. With limits between `least_forwards` and `most_forwards`, stages never wait for each other for ever.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array
from chunkplan.compiled import compiled
from chunkplan.cost.durations import ChunkTimes
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FORWARD_KV,
    RECOMPUTE,
    Actions,
    end_of_unit,
)
from chunkplan.schedule.holdings import ACTIVATIONS, CHANGES
from chunkplan.schedule.orders import Order

#: In place of `overrun`: backwards are not split.
WHOLE = -1

#: Later than any time, and far enough from the largest integer to be added to.
_NEVER = 2**62

#: Whether a chunk's activations come (1) or go (-1) with each op, int64 [num_ops].
ADDED = CHANGES[:, :, ACTIVATIONS].sum(axis=1)

#: What a stage can do next; of two that can start at the same time, the first one goes first.
_BACKWARD, _FORWARD, _WEIGHT = range(3)


class Limits(NamedTuple):
    """What stages may do.

    `forwards` int64 [pp, n]: the most forwards before each backward in order; `forward_first` bool [pp]: of a forward
    and a backward that can start at the same time, which one does; `memory` int64 [pp]: the most tokens retained;
    `idle` int64 [pp]: the most time without work, before it is given up.
    """

    forwards: Int64Array
    forward_first: BoolArray
    memory: Int64Array
    idle: Int64Array


@compiled
def list_schedule(
    chunks: Chunks, times: ChunkTimes, order: Order, limits: Limits, overrun: int, actions: Actions
) -> int:
    """Fill `actions` and say when all is done; -1 where a stage idles more than it may (`actions` is then half filled).

    What can start first is done first. A chunk that kept nothing is recomputed directly before its backward, so that it
    is done when the gradient arrives. Weight halves, unless `overrun` is `WHOLE`, fill what would be waiting: one
    starts where it delays the next forward or backward, as far as that one is known, by at most `overrun` per cent of
    its own time, and wherever room is needed. Groups have no more holders than they keep.
    """
    # A name for every array, and few calls: handing them on would take several times longer than the work itself.
    n, pp = chunks.num_tokens.size, limits.memory.size
    keeps, num_tokens, durations, link = chunks.keeps_activations, chunks.num_tokens, times.durations, times.link
    forwards, backwards, ops, chunk_ids = order.forwards, order.backwards, actions.ops, actions.chunk_ids
    head, num_kept = units(chunks)  # [n]
    clock, idle, retained = np.zeros(pp, np.int64), np.zeros(pp, np.int64), np.zeros(pp, np.int64)
    forwarded, backwarded, weighted = np.zeros(pp, np.int64), np.zeros(pp, np.int64), np.zeros(pp, np.int64)
    start, kind, weight = np.empty(pp, np.int64), np.empty(pp, np.int64), np.empty(pp, np.int64)
    forward_ready, backward_ready, holders, is_weighted = _nothing_done(pp, n)  # [pp, n]
    action, changed = actions.stages[:-1].copy(), range(pp)
    while True:
        for stage in changed:
            now, room = clock[stage], limits.memory[stage] - retained[stage]
            start[stage], kind[stage] = _NEVER, _WEIGHT
            must_release = -1  # the group that has to have fewer holders first
            if backwarded[stage] < n:
                chunk = backwards[backwarded[stage]]
                ready = backward_ready[stage, chunk]
                if ready >= 0 and not keeps[chunk]:
                    ready = max(ready - durations[RECOMPUTE, stage, chunk], 0) if num_tokens[chunk] <= room else -1
                    if holders[stage, head[chunk]] >= num_kept[head[chunk]]:
                        ready, must_release = -1, head[chunk]
                if ready >= 0:
                    start[stage], kind[stage] = max(now, ready), _BACKWARD
            if forwarded[stage] < n and forwarded[stage] < limits.forwards[stage, backwarded[stage]]:
                chunk = forwards[forwarded[stage]]
                ready = forward_ready[stage, chunk] if num_tokens[chunk] <= room or not keeps[chunk] else -1
                if ready >= 0 and max(now, ready) < start[stage] + limits.forward_first[stage]:
                    start[stage], kind[stage] = max(now, ready), _FORWARD
            if start[stage] > now and weighted[stage] < backwarded[stage] and overrun != WHOLE:
                place = next_weight(is_weighted[stage], weighted[stage], backwards, head, must_release)
                duration = durations[BACKWARD_WEIGHT, stage, backwards[place]]
                if start[stage] == _NEVER or 100 * (now + duration - start[stage]) <= overrun * duration:
                    start[stage], kind[stage], weight[stage] = now, _WEIGHT, place

        stage = _soonest(start, kind)
        if start[stage] == _NEVER:
            return int(np.max(clock))
        idle[stage] += start[stage] - clock[stage]
        if idle[stage] > limits.idle[stage]:
            return -1
        clock[stage] = start[stage]
        if kind[stage] == _FORWARD:
            chunk = forwards[forwarded[stage]]
            op = FORWARD if keeps[chunk] else FORWARD_KV
            forwarded[stage] += 1
        elif kind[stage] == _BACKWARD:
            chunk = backwards[backwarded[stage]]
            op = BACKWARD if overrun == WHOLE else BACKWARD_INPUT
            backwarded[stage] += 1
        else:
            chunk, op = backwards[weight[stage]], BACKWARD_WEIGHT
            is_weighted[stage, weight[stage]] = True
            weighted[stage] = next_weight(is_weighted[stage], weighted[stage], backwards, head, -1)
        is_recomputed = kind[stage] == _BACKWARD and not keeps[chunk]
        for done in range(1 - is_recomputed, 2):
            done_op = op if done else RECOMPUTE
            ops[action[stage]], chunk_ids[action[stage]] = done_op, chunk
            action[stage] += 1
            clock[stage] += durations[done_op, stage, chunk]
            retained[stage] += ADDED[done_op] * num_tokens[chunk]
            holders[stage, head[chunk]] += ADDED[done_op]
        if kind[stage] == _FORWARD and stage + 1 < pp:
            forward_ready[stage + 1, chunk] = clock[stage] + link[chunk]
        elif kind[stage] == _FORWARD:
            backward_ready[stage, chunk] = clock[stage]
        elif kind[stage] == _BACKWARD and stage > 0:
            backward_ready[stage - 1, chunk] = clock[stage] + link[chunk]
        changed = range(max(stage - 1, 0), min(stage + 2, pp))


@compiled
def _nothing_done(pp: int, n: int) -> tuple[Int64Array, Int64Array, Int64Array, BoolArray]:
    """The state of `pp` stages and n chunks at the start, [pp, n] each.

    When each forward and each backward could start, -1 where that is not known; how many chunks of each unit are held,
    at the place of its first one; whether each weight half is done, in the order of backwards.
    """
    forward_ready, backward_ready = np.full((pp, n), -1, np.int64), np.full((pp, n), -1, np.int64)
    forward_ready[0] = 0
    return forward_ready, backward_ready, np.zeros((pp, n), np.int64), np.zeros((pp, n), np.bool_)


@compiled
def _soonest(start: Int64Array, kind: Int64Array) -> int:
    """The stage that can start first, [pp]; of several the one that does the first kind of thing."""
    stage = 0
    for other in range(1, start.size):
        if start[other] < start[stage] or (start[other] == start[stage] and kind[other] < kind[stage]):
            stage = other
    return stage


@compiled
def next_weight(is_weighted: BoolArray, place: int, backwards: Int64Array, head: Int64Array, unit: int) -> int:
    """The first weight half from `place` on, in the order of backwards [n], that is not done; of `unit` unless -1."""
    while place < is_weighted.size and (is_weighted[place] or (unit >= 0 and head[backwards[place]] != unit)):
        place += 1
    return place


@compiled
def units(chunks: Chunks) -> tuple[Int64Array, Int64Array]:
    """The first chunk of each chunk's unit, and of each such first chunk how many of its unit are kept: int64 [n]."""
    n = chunks.keeps_activations.size
    head, num_kept = np.empty(n, np.int64), np.zeros(n, np.int64)
    start = 0
    while start < n:
        stop = end_of_unit(chunks.group_id, start)
        head[start:stop] = start
        num_kept[start] = np.sum(chunks.keeps_activations[start:stop])
        start = stop
    return head, num_kept
