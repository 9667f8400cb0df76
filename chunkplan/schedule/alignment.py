"""In which order the ranks of a stage meet, where they share weights or gradients: slots, and what is padding in them.

Ranks that share weights fetch the layers of a stage together, and ranks that share gradients sum them together, so all
of them have to do the same fetches and sums in the same order, whatever their own actions are. A *slot* is such a
meeting: one op, on one virtual stage. In it every rank of the stage either does its next action, if that is the slot's,
or takes part without one, which is a *padding*. What meets nobody (`meeting_of`) is done between slots.

*Nobody waits for ever.* `align` plays the step through on all stages of all ranks, event by event. An event is a slot
of a stage, or an action beside slots; it begins once all that it waits for has been played: what the ranks in it did
before, what comes to their own actions from other stages, and of an action that ranks share, all of these at it. So the
order of play is a topological order of all that waits for something, slots included: a padding asks for nothing but its
rank's place in that order. Processes that do the events of theirs in this order cannot wait in a circle, as the first
event of it that is not done waits for nothing that is not done. And the play goes on to the end for every plan that is
valid without slots, as any action that could come next there has its slot, and whoever else is on the stage can pad.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from chunkplan.arrays import Int64Array, offsets_of
from chunkplan.compiled import compiled
from chunkplan.cost.durations import ChunkTimes
from chunkplan.cost.model import CostModel, Sharding
from chunkplan.operations import BACKWARDS, FORWARDS, MEETINGS, OPS
from chunkplan.planfile.chunks import Chunks, chunks_of_ranks
from chunkplan.schedule.actions import (
    BACKWARD_WEIGHT,
    Actions,
    Int8Array,
    actions_of_rank,
    model_stages_of,
    times_of_ranks,
)

_NEVER = 1 << 62

#: Which of the ops that could come next a slot is for: that of the rank with most left to do, or that of most ranks.
_LONGEST, _MOST = 0, 1


class Slots(NamedTuple):
    """The slots of a step, and where actions come between them.

    `ops` int8 and `virtual_stages` int64 [num_slots], those of stage s from `stages[s]` to `stages[s + 1]` in order,
    int64 [pp + 1]. `before` int64 [num_actions]: how many slots of its stage are over when an action begins; if it
    meets others, the one after these is its own. `ends` int64 [num_actions]: when it ends, in the unit of the times; a
    slot is over for all at once. -1 of what is never done, as ranks wait for each other for ever.
    """

    ops: Int8Array
    virtual_stages: Int64Array
    stages: Int64Array
    before: Int64Array
    ends: Int64Array


class _Step(NamedTuple):
    """What ranks do, by action; `rows` int64 [dp * pp + 1]: where those of each stage of each rank begin.

    `slots`: the op and virtual stage of its slot as one number, -1 for none. `durations`. `needs`: the action whose end
    it waits for, -1 for none, and `links`, what comes after that on the way. `meets`: one number for all that ranks
    begin together, as they share the chunk, and `sizes`, how many these are; -1 and 1 for what a rank does alone.
    """

    rows: Int64Array
    slots: Int64Array
    durations: Int64Array
    needs: Int64Array
    links: Int64Array
    meets: Int64Array
    sizes: Int64Array


class _Now(NamedTuple):
    """Where a play is: by row, when it is `free`, its `next` action, when that could `start` beside slots (-1: not
    known yet), what is `left` to do; by action its `ends` and what came `before`; by stage, how many slots are `over`.
    """

    free: Int64Array
    next: Int64Array
    start: Int64Array
    left: Int64Array
    ends: Int64Array
    before: Int64Array
    over: Int64Array


def meeting_of(sharding: Sharding) -> Int8Array:
    """The op of the slot that each op needs (`MEETINGS`), by its code, -1 for none: int8 [num_ops]."""
    slot_of = MEETINGS.get(sharding, {})
    return np.array([OPS.index(slot_of[op]) if op in slot_of else -1 for op in OPS], np.int8)


def meeting_on(cost: CostModel, dp: int) -> Int8Array | None:
    """`meeting_of` what `dp` data-parallel ranks share; None where they meet for nothing within a step."""
    return meeting_of(cost.sharding) if dp > 1 and cost.shares("gradients") else None


def align_steps(
    chunks: Chunks, actions: Actions, times: ChunkTimes, meeting: Int8Array, dp: int, pp: int, v_shaped: bool = False
) -> tuple[Int64Array, Int64Array]:
    """`ends` and `before` of each action in the slots of its step, int64 [num_actions] both: see `Slots`.

    The `dp` ranks of a step follow one another, as do the steps. The other arguments are those of `align`.
    """
    before, ends = np.empty(actions.ops.size, np.int64), np.empty(actions.ops.size, np.int64)
    for step in range((chunks.rank_chunks.size - 1) // dp):
        first, last = step * dp, (step + 1) * dp
        own = chunks_of_ranks(chunks, first, last), actions_of_rank(actions, step, dp * pp)
        slots = align(*own, times_of_ranks(chunks, times, first, last), meeting, dp, pp, v_shaped)
        ends[actions.stages[first * pp] : actions.stages[last * pp]] = slots.ends
        before[actions.stages[first * pp] : actions.stages[last * pp]] = slots.before
    return ends, before


def align(
    chunks: Chunks, actions: Actions, times: ChunkTimes, meeting: Int8Array, dp: int, pp: int, v_shaped: bool = False
) -> Slots:
    """The slots of a step of `dp` ranks, whose chunks, actions and times are as in `meetings.simulate_steps`.

    `meeting`: see `meeting_of`. Of some simple rules that one is taken by which the step is over first. The same
    arguments have the same slots, on every machine.
    """
    num_virtual_stages = times.durations.shape[1] // pp
    step = _step(chunks, actions, times, meeting, pp, v_shaped)
    now, slots, stages = min(_plays(step, pp), key=lambda played: played[0].ends.max(initial=0))
    ops, virtual_stages = np.divmod(slots[np.argsort(stages, kind="stable")], num_virtual_stages)
    return Slots(
        ops.astype(np.int8), virtual_stages, offsets_of(np.bincount(stages, minlength=pp)), now.before, now.ends
    )


def _plays(step: _Step, pp: int) -> Iterator[tuple[_Now, Int64Array, Int64Array]]:
    """The plays of a step by each rule: one where they are the same."""
    if pp == 1 and _are_alike(step):
        slots = _play_alike(step, now := _begin(step, pp))
        yield now, slots, np.zeros_like(slots)
        return
    for rule, patience in product((_LONGEST, _MOST), (0, 1)):
        yield (now := _begin(step, pp)), *_play(step, now, pp, rule, patience)


def _step(chunks: Chunks, actions: Actions, times: ChunkTimes, meeting: Int8Array, pp: int, v_shaped: bool) -> _Step:
    ops, num_actions = actions.ops, actions.ops.size
    _, num_model_stages, num_chunks = times.durations.shape
    rank = np.repeat(np.arange(actions.stages.size - 1) // pp, np.diff(actions.stages))  # [num_actions]
    chunk = chunks.rank_chunks[rank] + actions.chunk_ids
    model_stage = model_stages_of(actions, pp, v_shaped)
    needs, links = np.full(num_actions, -1), np.zeros(num_actions, np.int64)
    for names, before in ((FORWARDS, -1), (BACKWARDS, 1)):
        own = np.flatnonzero(np.isin(ops, [OPS.index(name) for name in names]))
        # A model stage more at either end, which does all before anything else; -2: what nobody ever does.
        by_place = np.full((num_model_stages + 2, num_chunks), -2)
        by_place[[0, -1]] = -1
        by_place[model_stage[own] + 1, chunk[own]] = own
        needs[own] = by_place[model_stage[own] + 1 + before, chunk[own]]
        turns = v_shaped & (np.minimum(model_stage[own], model_stage[own] + before) == pp - 1)
        links[own] = np.where(turns | (pp == 1), 0, times.link[chunk[own]])
    sizes = np.where(ops == BACKWARD_WEIGHT, 1, chunks.cp_size[chunk])
    # Blocks are nested and come first, so that a shared chunk has one number on all of its ranks.
    met = chunks.rank_chunks[chunks.cp_first_rank[chunk]] + actions.chunk_ids
    meets = np.where(sizes > 1, (met * num_model_stages + model_stage) * len(OPS) + ops, -1)
    slot = meeting[ops].astype(np.int64)
    slots = np.where(slot < 0, -1, slot * (num_model_stages // pp) + actions.virtual_stages)
    durations = times.durations[ops, model_stage, chunk]
    return _Step(actions.stages, slots, durations, needs, links, meets, sizes.astype(np.int64))


def _begin(step: _Step, pp: int) -> _Now:
    row, num_rows = np.repeat(np.arange(step.rows.size - 1), np.diff(step.rows)), step.rows.size - 1
    return _Now(
        free=np.zeros(num_rows, np.int64),
        next=step.rows[:-1].copy(),
        start=np.zeros(num_rows, np.int64),
        left=np.bincount(row, step.durations, num_rows).astype(np.int64),
        ends=np.full(row.size, -1, np.int64),
        before=np.zeros(row.size, np.int64),
        over=np.zeros(pp, np.int64),
    )


@compiled
def _are_alike(step: _Step) -> bool:
    """Whether all ranks of the only stage go through the same slots as far as they go, and wait for nothing else."""
    longest = step.slots[step.rows[np.argmax(np.diff(step.rows))] :]
    for row in range(step.rows.size - 1):
        own = step.slots[step.rows[row] : step.rows[row + 1]]
        if np.any(own != longest[: own.size]):
            return False
    return not (np.any(step.needs != -1) or np.any(step.meets >= 0))


@compiled
def _play_alike(step: _Step, now: _Now) -> Int64Array:
    """Play a step whose ranks `_are_alike`: its slots. Any rule of `_play` has the same, in more time."""
    longest = np.argmax(np.diff(step.rows))
    slots = step.slots[step.rows[longest] : step.rows[longest + 1]]
    for slot in slots:
        begin, lasts = np.max(now.free), 0
        for row in range(now.free.size):
            if now.next[row] < step.rows[row + 1]:
                lasts = max(lasts, step.durations[now.next[row]])
        for row in range(now.free.size):
            if now.next[row] < step.rows[row + 1]:
                end = begin + lasts if slot >= 0 else now.free[row] + step.durations[now.next[row]]
                _do(step, now, row, int(end), 0)
            elif slot >= 0:
                now.free[row] = begin + lasts
        now.over[0] += slot >= 0
    return slots[slots >= 0]


@compiled
def _play(step: _Step, now: _Now, pp: int, rule: int, patience: int) -> tuple[Int64Array, Int64Array]:
    """Play a step from its beginning, by one rule: slots in the order of play, as one number each, and their stages.

    `patience`: 1 if a slot waits for ranks that could soon do their own in it, up to half of what it takes, else 0.
    """
    num_rows = step.rows.size - 1
    slots, slot_stages = np.empty(step.slots.size, np.int64), np.empty(step.slots.size, np.int64)
    num_slots = 0
    for each in range(num_rows):
        now.start[each] = _start(step, now, pp, each)
    while True:
        at, stage, row = _first(step, now, pp)
        if at == _NEVER:
            break
        if row < 0:
            slots[num_slots], slot_stages[num_slots] = _meet(step, now, pp, stage, at, rule, patience), stage
            num_slots += 1
        else:
            meets = step.meets[now.next[row]]
            for other in range(row % pp, num_rows, pp):
                is_there = now.next[other] < step.rows[other + 1] and step.meets[now.next[other]] == meets >= 0
                if other == row or is_there:
                    _do(step, now, other, at + step.durations[now.next[other]], stage)
        for each in range(num_rows):
            if now.start[each] < 0 or each % pp == stage:
                now.start[each] = _start(step, now, pp, each)
    return slots[:num_slots], slot_stages[:num_slots]


@compiled
def _first(step: _Step, now: _Now, pp: int) -> tuple[int, int, int]:
    """What begins first: when, on which stage, and the row if it meets no slot (else -1); at `_NEVER` if nothing can.

    Of what begins at one time, what meets no slot: it may be what a slot would then have more ranks for.
    """
    at, at_stage, at_row = _NEVER, -1, -1
    for stage in range(pp):
        free = np.max(now.free[stage::pp])  # a slot needs all ranks
        for row in range(stage, now.next.size, pp):
            if now.start[row] < 0:
                continue
            meets = step.slots[now.next[row]] >= 0
            start = max(free, now.start[row]) if meets else now.start[row]
            if start < at or (start == at and at_row < 0 and not meets):
                at, at_stage, at_row = start, stage, -1 if meets else row
    return at, at_stage, at_row


@compiled
def _meet(step: _Step, now: _Now, pp: int, stage: int, at: int, rule: int, patience: int) -> int:
    """Play a slot of a stage that begins at `at`, or a little later; returns what it is, as one number."""
    slot, most, best = -1, -1, -1
    for row in range(stage, now.next.size, pp):
        if 0 <= now.start[row] <= at and step.slots[now.next[row]] >= 0:
            same = 0
            if rule == _MOST:
                for other in range(stage, now.next.size, pp):
                    same += _is_in(step, now, other, step.slots[now.next[row]], at)
            if same > most or (same == most and now.left[row] > now.left[best]):
                slot, most, best = step.slots[now.next[row]], same, row
    longest = 0
    for again in range(1 + patience):
        for row in range(stage, now.next.size, pp):
            if _is_in(step, now, row, slot, at):
                longest = max(longest, step.durations[now.next[row]])
        if again < patience:
            soon = at + longest // 2
            for row in range(stage, now.next.size, pp):
                if _is_in(step, now, row, slot, soon):
                    at = max(at, now.start[row])
    for row in range(stage, now.next.size, pp):
        if _is_in(step, now, row, slot, at):
            _do(step, now, row, at + longest, stage)
        else:
            now.free[row] = at + longest
    now.over[stage] += 1
    return slot


@compiled
def _do(step: _Step, now: _Now, row: int, end: int, stage: int) -> None:
    """Do the next action of a row until `end`."""
    action = now.next[row]
    now.free[row] = now.ends[action] = end
    now.before[action] = now.over[stage]
    now.left[row] -= step.durations[action]
    now.next[row] += 1


@compiled
def _is_in(step: _Step, now: _Now, row: int, slot: int, at: int) -> bool:
    """Whether a row could do its next action in a slot that begins at `at`."""
    return bool(0 <= now.start[row] <= at and step.slots[now.next[row]] == slot)


@compiled
def _start(step: _Step, now: _Now, pp: int, row: int) -> int:
    """When the next action of a row could begin if it met no slot; -1 if there is none, or that is not known yet."""
    if now.next[row] == step.rows[row + 1]:
        return -1
    meets = step.meets[now.next[row]]
    if meets < 0:
        return _ready(step, now, row)
    latest, num_there = 0, 0
    for other in range(row % pp, now.next.size, pp):
        if now.next[other] < step.rows[other + 1] and step.meets[now.next[other]] == meets:
            ready = _ready(step, now, other)
            if ready < 0:
                return -1
            latest, num_there = max(latest, ready), num_there + 1
    return latest if num_there == step.sizes[now.next[row]] else -1


@compiled
def _ready(step: _Step, now: _Now, row: int) -> int:
    """When a row is free and what its next action waits for is there; -1 if that is not done yet."""
    action = now.next[row]
    needs = step.needs[action]
    ready: int = now.free[row]
    if needs >= 0:
        ready = max(ready, now.ends[needs] + step.links[action])
    return -1 if needs < -1 or (needs >= 0 and now.ends[needs] < 0) else ready
