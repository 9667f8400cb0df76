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
from chunkplan.schedule.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FORWARD_KV,
    RECOMPUTE,
    Actions,
    RankChunks,
    end_of_unit,
)
from chunkplan.schedule.orders import Order

#: In place of `overrun`: backwards are not split.
WHOLE = -1

#: Later than any time, and far enough from the largest integer to be added to.
_NEVER = 2**62

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
def list_schedule(rank: RankChunks, order: Order, limits: Limits, overrun: int, actions: Actions) -> int:
    """Fill `actions` and say when all is done; -1 where a stage idles more than it may (`actions` is then half filled).

    What can start first is done first. A chunk that kept nothing is recomputed directly before its backward, so that it
    is done when the gradient arrives. Weight halves, unless `overrun` is `WHOLE`, fill
    what would be waiting: one starts where it delays the next forward or backward, as far as that one is known, by at
    most `overrun` per cent of its own time, and wherever room is needed. Groups have no more holders than they keep.
    """
    # One function, and a name for every array: handing them on would take several times longer than the work itself.
    n, pp = rank.keeps.size, limits.memory.size
    keeps, num_tokens, durations, link = rank.keeps, rank.num_tokens, rank.durations, rank.link
    forwards, backwards = order.forwards, order.backwards
    ops, chunk_ids = actions.ops, actions.chunk_ids
    most_ahead, memory, most_idle = limits.forwards, limits.memory, limits.idle
    head, num_kept = _units(rank)

    clock, idle, retained = np.zeros(pp, np.int64), np.zeros(pp, np.int64), np.zeros(pp, np.int64)
    forwarded, backwarded, weighted = np.zeros(pp, np.int64), np.zeros(pp, np.int64), np.zeros(pp, np.int64)
    forward_end, backward_end = np.full((pp, n), -1, np.int64), np.full((pp, n), -1, np.int64)
    is_weighted, holders = np.zeros((pp, n), np.bool_), np.zeros((pp, n), np.int64)
    action = actions.stages[:-1].copy()
    start, kind, weight = np.empty(pp, np.int64), np.empty(pp, np.int64), np.empty(pp, np.int64)
    changed = range(pp)
    while True:
        for stage in changed:
            now, room = clock[stage], memory[stage] - retained[stage]
            start[stage], kind[stage] = _NEVER, _WEIGHT
            must_release = -1  # the group that has to have fewer holders first
            if backwarded[stage] < n:
                chunk = backwards[backwarded[stage]]
                arrival = forward_end[stage, chunk] if stage + 1 == pp else backward_end[stage + 1, chunk]
                if arrival >= 0 and stage + 1 < pp:
                    arrival += link[chunk]
                if arrival >= 0 and not keeps[chunk]:
                    arrival = max(arrival - durations[RECOMPUTE, stage, chunk], 0)
                    if holders[stage, head[chunk]] >= num_kept[head[chunk]]:
                        arrival, must_release = -1, head[chunk]
                    elif num_tokens[chunk] > room:
                        arrival = -1
                if arrival >= 0:
                    start[stage], kind[stage] = max(now, arrival), _BACKWARD
            if forwarded[stage] < n and forwarded[stage] < most_ahead[stage, backwarded[stage]]:
                chunk = forwards[forwarded[stage]]
                arrival = 0 if stage == 0 else forward_end[stage - 1, chunk]
                if arrival >= 0 and stage > 0:
                    arrival += link[chunk]
                if keeps[chunk] and num_tokens[chunk] > room:
                    arrival = -1
                if arrival >= 0 and max(now, arrival) < start[stage] + limits.forward_first[stage]:
                    start[stage], kind[stage] = max(now, arrival), _FORWARD
            if start[stage] > now and weighted[stage] < backwarded[stage] and overrun != WHOLE:
                place = weighted[stage]
                while is_weighted[stage, place] or (must_release >= 0 and head[backwards[place]] != must_release):
                    place += 1
                duration = durations[BACKWARD_WEIGHT, stage, backwards[place]]
                if start[stage] == _NEVER or 100 * (now + duration - start[stage]) <= overrun * duration:
                    start[stage], kind[stage], weight[stage] = now, _WEIGHT, place

        stage = 0
        for other in range(1, pp):
            if start[other] < start[stage] or (start[other] == start[stage] and kind[other] < kind[stage]):
                stage = other
        if start[stage] == _NEVER:
            return int(np.max(clock))
        idle[stage] += start[stage] - clock[stage]
        if idle[stage] > most_idle[stage]:
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
            if not keeps[chunk]:
                ops[action[stage]], chunk_ids[action[stage]] = RECOMPUTE, chunk
                action[stage] += 1
                clock[stage] += durations[RECOMPUTE, stage, chunk]
        else:
            chunk = backwards[weight[stage]]
            op = BACKWARD_WEIGHT
            is_weighted[stage, weight[stage]] = True
            while weighted[stage] < n and is_weighted[stage, weighted[stage]]:
                weighted[stage] += 1
        ops[action[stage]], chunk_ids[action[stage]] = op, chunk
        action[stage] += 1
        clock[stage] += durations[op, stage, chunk]
        if op == FORWARD or (kind[stage] == _BACKWARD and not keeps[chunk]):
            retained[stage] += num_tokens[chunk]
            holders[stage, head[chunk]] += 1
        if op in (BACKWARD, BACKWARD_WEIGHT):
            retained[stage] -= num_tokens[chunk]
            holders[stage, head[chunk]] -= 1
        if kind[stage] == _FORWARD:
            forward_end[stage, chunk] = clock[stage]
        elif kind[stage] == _BACKWARD:
            backward_end[stage, chunk] = clock[stage]
        changed = range(max(stage - 1, 0), min(stage + 2, pp))


@compiled
def _units(rank: RankChunks) -> tuple[Int64Array, Int64Array]:
    """The first chunk of each chunk's unit, and of each such first chunk how many of its unit are kept: int64 [n]."""
    n = rank.keeps.size
    head, num_kept = np.empty(n, np.int64), np.zeros(n, np.int64)
    first = 0
    while first < n:
        last = end_of_unit(rank.group_id, first)
        head[first:last] = first
        num_kept[first] = np.sum(rank.keeps[first:last])
        first = last
    return head, num_kept
