"""A list scheduler for pipelines: of all actions that could be next, the one that can start first is run.

The orders of forwards and of backwards are given, the same for all stages of a rank. Their interleaving on each stage
is decided here, under limits on how far forwards run ahead of backwards and on the tokens whose activations a stage
retains. With limits between `least_forwards` and `most_forwards`, stages never deadlock.

Ranks that share chunks are scheduled together: they start an action with a shared chunk at the same time, when all can.
Shared chunks come first in both orders, on all ranks that have them, so that these have done equally many.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.compiled import compiled, compiled_in_place, inlined
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
    unit_end,
)
from chunkplan.schedule.holdings import ACTIVATIONS, CHANGES
from chunkplan.schedule.orders import Order

#: In place of `overrun`: backwards are not split.
WHOLE = -1

#: Later than any time, and far enough from the largest integer to be added to.
_NEVER = 2**62

#: Sign by which a chunk's activations change with each op, int64 [num_ops]: 1, 0 or -1.
ADDED = CHANGES[:, :, ACTIVATIONS].sum(axis=1)

#: Possible next actions of a stage; of two that can start at the same time, the first one goes first.
_BACKWARD, _FORWARD, _WEIGHT = range(3)


class Limits(NamedTuple):
    """Limits of stages; a row is a stage of a rank, the stages of each rank one after another.

    `forwards` int64 [pp, n]: the most forwards of the rank before each of its backwards in order; `forward_first` bool
    [rows]: of a forward and a backward that can start at the same time, which one does; `memory` int64 [rows]: the most
    tokens retained; `idle` int64 [rows]: the most time without work, before it is given up; `tails` int64 [pp, 2 n]:
    how long it takes from the start of each forward, and of each backward with its recompute, to the end of all, at
    least; [pp, 0] for stages that do not look ahead.
    """

    forwards: Int64Array
    forward_first: BoolArray
    memory: Int64Array
    idle: Int64Array
    tails: Int64Array


class _State(NamedTuple):
    """Progress of rows, and their possible next actions.

    int64 [rows]: `clock`, `idle` time so far, tokens `retained`; the places in both orders, `forward`, `backward`,
    `weighted` (before it all weight halves are done), that are next; what is chosen, `start`, `kind` and, of a weight
    half, `weight`. int64 [pp, n]: `forward_ready`, `backward_ready`, when each could start, -1 where that is not known;
    `holders`, how many chunks of each unit are held, at the place of its first one. `is_weighted` bool [pp, n]: whether
    each weight half is done, in the order of backwards. Int64 [n]: `head`, `num_kept`, see `units`.
    """

    clock: Int64Array
    idle: Int64Array
    retained: Int64Array
    forward: Int64Array
    backward: Int64Array
    weighted: Int64Array
    start: Int64Array
    kind: Int64Array
    weight: Int64Array
    forward_start: Int64Array
    backward_start: Int64Array
    release: Int64Array
    forward_ready: Int64Array
    backward_ready: Int64Array
    holders: Int64Array
    is_weighted: BoolArray
    head: Int64Array
    num_kept: Int64Array


@compiled
def list_schedule(
    chunks: Chunks, times: ChunkTimes, order: Order, limits: Limits, overrun: int, actions: Actions
) -> int:
    """Fill `actions` and return the end of all; -1 where a stage idles beyond its limit (`actions` is then half
    filled).

    The action that can start first is run first; with tails, the order of a forward and a backward in which both tails
    end sooner. A chunk that kept nothing is recomputed directly before its backward, so that it is done when the
    gradient arrives. Weight halves, unless `overrun` is `WHOLE`, fill bubbles: one starts where it delays the next
    known forward or backward by at most `overrun` per cent of its own time, and wherever room is needed. Groups have no
    more holders than they keep.

    `chunks` are those of the ranks of a step, or of one rank; `order` has the chunks of one after another.
    """
    state = _initial_state(chunks, times.durations.shape[1])
    is_shared = bool(np.any(chunks.cp_size > 1))
    action = actions.stages[:-1].copy()
    is_done = _run(chunks, times, order, limits, overrun, actions, state, action, is_shared)
    return int(np.max(state.clock)) if is_done else -1


@compiled_in_place
def _run(
    chunks: Chunks,
    times: ChunkTimes,
    order: Order,
    limits: Limits,
    overrun: int,
    actions: Actions,
    state: _State,
    action: Int64Array,
    is_shared: bool,
) -> bool:
    """Schedule action after action; returns whether limits were kept. `action` [rows]: the next index into
    `actions`."""
    pp, num_rows = times.durations.shape[1], limits.memory.size
    keeps, bases = chunks.keeps_activations, chunks.rank_chunks
    forwards, backwards, ops, chunk_ids = order.forwards, order.backwards, actions.ops, actions.chunk_ids
    clock, idle, start, kind = state.clock, state.idle, state.start, state.kind
    forward, backward, weighted, weight = state.forward, state.backward, state.weighted, state.weight
    changed = range(num_rows)
    while True:
        _update_starts(chunks, times, order, limits, state, changed)
        if is_shared:
            _choose_next(chunks, times, order, limits, overrun, state, range(num_rows))
        else:
            _choose_next(chunks, times, order, limits, overrun, state, changed)
        first = _next_row(start, kind)
        if start[first] == _NEVER:
            return True
        own_rank, stage = divmod(first, pp)
        done_kind, begin, ranks = kind[first], start[first], range(own_rank, own_rank + 1)
        if is_shared and done_kind != _WEIGHT:
            chunk = forwards[forward[first]] if done_kind == _FORWARD else backwards[backward[first]]
            if chunks.cp_size[chunk] > 1:
                ranks = range(chunks.cp_first_rank[chunk], chunks.cp_first_rank[chunk] + chunks.cp_size[chunk])
        for rank in ranks:
            row = rank * pp + stage
            idle[row], clock[row] = idle[row] + begin - clock[row], begin
            if idle[row] > limits.idle[row]:
                return False
            if done_kind == _FORWARD:
                chunk = forwards[forward[row]]
                op = FORWARD if keeps[chunk] else FORWARD_KV
                forward[row] += 1
            elif done_kind == _BACKWARD:
                chunk = backwards[backward[row]]
                op = BACKWARD if overrun == WHOLE else BACKWARD_INPUT
                backward[row] += 1
            else:
                chunk, op = backwards[weight[row]], BACKWARD_WEIGHT
                state.is_weighted[stage, weight[row]] = True
                weighted[row] = next_weight(state.is_weighted[stage], weighted[row], backwards, state.head, -1)
            is_recomputed = done_kind == _BACKWARD and not keeps[chunk]
            for done in range(1 - is_recomputed, 2):
                done_op = op if done else RECOMPUTE
                ops[action[row]], chunk_ids[action[row]] = done_op, chunk - bases[rank]
                action[row] += 1
                clock[row] += times.durations[done_op, stage, chunk]
                state.retained[row] += ADDED[done_op] * chunks.num_tokens[chunk]
                state.holders[stage, state.head[chunk]] += ADDED[done_op]
            if done_kind == _FORWARD and stage + 1 < pp:
                state.forward_ready[stage + 1, chunk] = clock[row] + times.link[chunk]
            elif done_kind == _FORWARD:
                state.backward_ready[stage, chunk] = clock[row]
            elif done_kind == _BACKWARD and stage > 0:
                state.backward_ready[stage - 1, chunk] = clock[row] + times.link[chunk]
        if ranks.stop - ranks.start > 1:
            changed = range(ranks.start * pp, ranks.stop * pp)
        else:
            changed = range(max(first - 1, own_rank * pp), min(first + 2, (own_rank + 1) * pp))


@inlined
def _update_starts(chunks: Chunks, times: ChunkTimes, order: Order, limits: Limits, state: _State, rows: range) -> None:
    """Update the earliest start of the next forward and backward of some rows, other ranks aside."""
    pp, bases = times.durations.shape[1], chunks.rank_chunks
    keeps, num_tokens = chunks.keeps_activations, chunks.num_tokens
    for row in rows:
        rank, stage = divmod(row, pp)
        now, room, end = state.clock[row], limits.memory[row] - state.retained[row], bases[rank + 1]
        state.forward_start[row], state.backward_start[row] = _NEVER, _NEVER
        state.release[row] = -1  # the group that has to have fewer holders first
        if state.backward[row] < end:
            chunk = order.backwards[state.backward[row]]
            ready = state.backward_ready[stage, chunk]
            if ready >= 0 and not keeps[chunk]:
                head = state.head[chunk]
                fits = num_tokens[chunk] <= room
                ready = max(ready - times.durations[RECOMPUTE, stage, chunk], 0) if fits else -1
                if state.holders[stage, head] >= state.num_kept[head]:
                    ready, state.release[row] = -1, head
            if ready >= 0:
                state.backward_start[row] = max(now, ready)
        place = state.forward[row]
        if place < end and place - bases[rank] < limits.forwards[stage, state.backward[row]]:
            chunk = order.forwards[place]
            ready = state.forward_ready[stage, chunk] if num_tokens[chunk] <= room or not keeps[chunk] else -1
            if ready >= 0:
                state.forward_start[row] = max(now, ready)


@inlined
def _choose_next(
    chunks: Chunks, times: ChunkTimes, order: Order, limits: Limits, overrun: int, state: _State, rows: range
) -> None:
    """Choose the next action of some rows and its start; shared chunks start when all their ranks can."""
    pp, cp_size, first_rank = times.durations.shape[1], chunks.cp_size, chunks.cp_first_rank
    start, kind = state.start, state.kind
    for row in rows:
        stage = row % pp
        forward_at, backward_at = state.forward_start[row], state.backward_start[row]
        start[row], kind[row] = backward_at, _WEIGHT
        if backward_at != _NEVER:
            backward = order.backwards[state.backward[row]]
            if cp_size[backward] > 1:
                backward_at = _joint_start(first_rank, cp_size, backward, state.backward_start, stage, pp)
            start[row], kind[row] = backward_at, _WEIGHT if backward_at == _NEVER else _BACKWARD
        if forward_at != _NEVER:
            forward = order.forwards[state.forward[row]]
            if cp_size[forward] > 1:
                forward_at = _joint_start(first_rank, cp_size, forward, state.forward_start, stage, pp)
            starts = forward_at, backward_at
            if forward_at != _NEVER and (
                backward_at == _NEVER
                or _forward_goes_first(limits, times, chunks.keeps_activations, row, forward, backward, overrun, starts)
            ):
                start[row], kind[row] = forward_at, _FORWARD
        if overrun != WHOLE and start[row] > state.clock[row] and state.weighted[row] < state.backward[row]:
            is_done, place = state.is_weighted[stage], state.weighted[row]
            place = next_weight(is_done, place, order.backwards, state.head, state.release[row])
            duration = times.durations[BACKWARD_WEIGHT, stage, order.backwards[place]]
            late = state.clock[row] + duration - start[row]
            if start[row] == _NEVER or 100 * late <= overrun * duration:
                start[row], kind[row], state.weight[row] = state.clock[row], _WEIGHT, place


@compiled
def _joint_start(
    first_rank: Int32Array, cp_size: Int32Array, chunk: int, starts: Int64Array, stage: int, pp: int
) -> int:
    """The earliest common start of the ranks that share a chunk on a stage; `starts` [rows]: of each alone.

    It is the chunk that all of them have next, as they have done everything before it together.
    """
    latest = np.int64(0)
    for rank in range(first_rank[chunk], first_rank[chunk] + cp_size[chunk]):
        latest = max(latest, starts[rank * pp + stage])
    return int(latest)


@inlined
def _forward_goes_first(
    limits: Limits,
    times: ChunkTimes,
    keeps: BoolArray,
    row: int,
    forward: int,
    backward: int,
    overrun: int,
    starts: tuple[int, int],
) -> bool:
    """True if a row forwards chunk `forward` before the backward of `backward`; `starts`: the earliest of each."""
    forward_start, backward_start = starts
    is_sooner = forward_start < backward_start + limits.forward_first[row]
    if limits.tails.size == 0:
        return bool(is_sooner)
    stage = row % times.durations.shape[1]
    forward_tail, backward_tail = limits.tails[stage, forward], limits.tails[stage, keeps.size + backward]
    forward_end = forward_start + times.durations[FORWARD if keeps[forward] else FORWARD_KV, stage, forward]
    backward_end = backward_start + times.durations[BACKWARD if overrun == WHOLE else BACKWARD_INPUT, stage, backward]
    if not keeps[backward]:
        backward_end += times.durations[RECOMPUTE, stage, backward]
    end = max(forward_start + forward_tail, max(forward_end, backward_start) + backward_tail)
    other_end = max(backward_start + backward_tail, max(backward_end, forward_start) + forward_tail)
    return bool(end < other_end or (end == other_end and is_sooner))


@compiled
def _initial_state(chunks: Chunks, pp: int) -> _State:
    """The state of the stages of all ranks at the start."""
    n, bases = chunks.num_tokens.size, chunks.rank_chunks
    rows = (bases.size - 1) * pp
    place = np.repeat(bases[:-1], pp)
    head, num_kept = units(chunks)
    state = _State(
        clock=np.zeros(rows, np.int64),
        idle=np.zeros(rows, np.int64),
        retained=np.zeros(rows, np.int64),
        forward=place.copy(),
        backward=place.copy(),
        weighted=place,
        start=np.empty(rows, np.int64),
        kind=np.empty(rows, np.int64),
        weight=np.empty(rows, np.int64),
        forward_start=np.empty(rows, np.int64),
        backward_start=np.empty(rows, np.int64),
        release=np.empty(rows, np.int64),
        forward_ready=np.full((pp, n), -1, np.int64),
        backward_ready=np.full((pp, n), -1, np.int64),
        holders=np.zeros((pp, n), np.int64),
        is_weighted=np.zeros((pp, n), np.bool_),
        head=head,
        num_kept=num_kept,
    )
    state.forward_ready[0] = 0
    return state


@compiled
def _next_row(start: Int64Array, kind: Int64Array) -> int:
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
        stop = unit_end(chunks.group_id, start)
        head[start:stop] = start
        num_kept[start] = np.sum(chunks.keeps_activations[start:stop])
        start = stop
    return head, num_kept
