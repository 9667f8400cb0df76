"""In which order the ranks of a stage meet, where they share weights or gradients: slots, and what is padding in them.

Ranks that share weights fetch the layers of a stage together, and ranks that share gradients sum them together, so all
of them have to do the same fetches and sums in the same order, whatever their own actions are. A *slot* is such a
meeting: one op, on one virtual stage. In it every rank of the stage either does its next action, if that is the slot's,
or takes part without one, which is a *padding*. What meets nobody (`meeting_of`) is done between slots.

*Nothing deadlocks.* `align_steps` plays the step through on all stages of all ranks, event by event. An event is a
slot of a stage, or an action beside slots; it begins once all that it waits for has been played: what the ranks in it
did before, what comes to their own actions from other stages, and of an action that ranks share, all of these at it. So
the order of play is a topological order of all that waits for something, slots included: a padding asks for nothing but
its rank's place in that order. Processes that do the events of theirs in this order cannot wait in a cycle, as the
first event of it that is not done waits for nothing that is not done. And the play goes on to the end for every plan
that is valid without slots, as any action that could come next there has its slot, and whoever else is on the stage can
pad.
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int8Array, Int32Array, Int64Array, offsets_of
from chunkplan.compiled import compiled, compiled_in_place, compiled_part, copy_to
from chunkplan.cost.durations import ChunkTimes
from chunkplan.cost.model import CostModel, Sharding
from chunkplan.layers import STRAIGHT, StagePlacement
from chunkplan.operations import MEETINGS, OPS
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.simulate import (
    Now,
    PlayedStep,
    beginning,
    do_together,
    meet,
    play,
    simulate_slots,
    start_of,
    step_of,
)

_NEVER = 1 << 62

#: Which of the ops that could come next a slot is for: that of the rank with most left to do, or that of most ranks.
LONGEST, _MOST = 0, 1


def meeting_of(sharding: Sharding) -> Int8Array:
    """The op of the slot that each op needs (`MEETINGS`), by its code, -1 for none: int8 [num_ops]."""
    slot_of = MEETINGS.get(sharding, {})
    return np.array([OPS.index(slot_of[op]) if op in slot_of else -1 for op in OPS], np.int8)


def meeting_on(cost: CostModel, dp: int) -> Int8Array | None:
    """`meeting_of` what `dp` data-parallel ranks share; None where they meet for nothing within a step."""
    return meeting_of(cost.sharding) if dp > 1 and cost.shares("gradients") else None


@compiled
def align_steps(
    chunks: Chunks,
    actions: Actions,
    times: ChunkTimes,
    meeting: Int8Array,
    dp: int,
    pp: int,
    placement: StagePlacement = STRAIGHT,
) -> tuple[Int64Array, Int64Array]:
    """When each action ends in the slots of its step, and how many of its stage are over before it begins.

    The `dp` ranks of a step follow one another, as do the steps; chunks, actions and times are as in `simulate`.
    `meeting`: see `meeting_of`. Of some simple rules that one is taken by which the step is over first. The same
    arguments have the same slots, on every machine.

    Returns:
        int64 [num_actions] both. If an action meets others, the slot after those before it is its own, and it is over
        for all at once. The end of what is never done is -1, as ranks deadlock.
    """
    ends, before = np.empty(actions.ops.size, np.int64), np.empty(actions.ops.size, np.int64)
    for first in range(0, chunks.rank_chunks.size - 1, dp):
        own = slice(actions.stages[first * pp], actions.stages[(first + dp) * pp])
        step = step_of(chunks, actions, times, first, dp, pp, placement)
        slots = slot_kinds(step, actions.virtual_stages[own], meeting, times.durations.shape[1] // pp)
        now = _fastest(step, slots, meeting, pp)
        copy_to(ends[own], now.ends)
        copy_to(before[own], now.before)
    return ends, before


@compiled_part
def slot_kinds(step: PlayedStep, virtual_stages: Int32Array, meeting: Int8Array, num_virtual_stages: int) -> Int64Array:
    """The op and virtual stage of the slot of each action that needs one, as one number, else -1, by action."""
    kinds = np.empty(step.ops.size, np.int64)
    for action in range(step.ops.size):
        slot = meeting[step.ops[action]]
        kinds[action] = slot * num_virtual_stages + virtual_stages[action] if slot >= 0 else -1
    return kinds


@compiled_part
def _fastest(step: PlayedStep, slots: Int64Array, meeting: Int8Array, pp: int) -> Now:
    """The play of a step by the rule that has it over first."""
    best = beginning(step, pp)
    if pp == 1 and _are_alike(step, slots):
        before = np.empty(step.ops.size, np.int64)
        for row in range(step.rows.size - 1):
            over = 0
            for action in range(step.rows[row], step.rows[row + 1]):
                before[action] = over
                over += slots[action] >= 0
        play(step, best, pp, meeting, before)
        return best
    for number in range(4 if step.ops.size else 0):
        now = beginning(step, pp)
        play_by_rule(step, now, pp, slots, number // 2, number % 2)
        if number == 0 or np.max(now.ends) < np.max(best.ends):
            best = now
    return best


@compiled
def _are_alike(step: PlayedStep, slots: Int64Array) -> bool:
    """Whether all ranks of the only stage go through the same slots as far as they go, and wait for nothing else.

    Any rule has the same then, in more time.
    """
    longest = slots[step.rows[np.argmax(np.diff(step.rows))] :]
    for row in range(step.rows.size - 1):
        own = slots[step.rows[row] : step.rows[row + 1]]
        if np.any(own != longest[: own.size]):
            return False
    return not (np.any(step.needs != -1) or np.any(step.meets >= 0))


@compiled
def play_by_rule(step: PlayedStep, now: Now, pp: int, slots: Int64Array, rule: int, patience: int) -> None:
    """Play a step from its beginning, event by event, by one rule.

    `patience`: 1 if a slot waits for ranks that could soon do their own in it, up to half of what it takes, else 0.
    """
    num_rows = step.rows.size - 1
    start = np.full(num_rows, -1, np.int64)  # of each row, see `start_of`
    left = np.empty(step.ops.size, np.int64)  # of each action, what it and all after it on its row last
    for row in range(num_rows):
        own = slice(step.rows[row], step.rows[row + 1])
        copy_to(left[own], np.cumsum(step.lasts[own][::-1])[::-1])
    stage = -1
    while True:
        for row in range(num_rows):
            if start[row] < 0 or row % pp == stage:
                start[row] = start_of(step, now, row, pp)
        at, stage, row = _first(now, pp, slots, start)
        if at == _NEVER:
            break
        if row >= 0:
            do_together(step, now, row, at, pp)
        else:
            meet(step, now, stage, _join(step, now, pp, stage, at, slots, start, left, rule, patience), pp)


@compiled_in_place
def _first(now: Now, pp: int, slots: Int64Array, start: Int64Array) -> tuple[int, int, int]:
    """What begins first: when, on which stage, and the row if it meets no slot (else -1); at `_NEVER` if nothing can.

    Of what begins at one time, what meets no slot: it may be what a slot would then have more ranks for.
    """
    at, at_stage, at_row = np.int64(_NEVER), -1, -1
    for stage in range(pp):
        free = np.int64(0)  # a slot needs all ranks
        for row in range(stage, now.free.size, pp):
            free = max(free, now.free[row])
        for row in range(stage, now.free.size, pp):
            if start[row] < 0:
                continue
            meets = slots[now.next[row]] >= 0
            begin = max(free, start[row]) if meets else start[row]
            if begin < at or (begin == at and at_row < 0 and not meets):
                at, at_stage, at_row = begin, stage, -1 if meets else row
    return int(at), at_stage, at_row


@compiled_in_place
def _join(
    step: PlayedStep,
    now: Now,
    pp: int,
    stage: int,
    at: int,
    slots: Int64Array,
    start: Int64Array,
    left: Int64Array,
    rule: int,
    patience: int,
) -> int:
    """Say who is in the slot of a stage that begins at `at`, or a little later; returns when it does."""
    rows = range(stage, now.free.size, pp)
    slot, most, best = np.int64(-1), -1, -1
    for row in rows:
        if 0 <= start[row] <= at and slots[now.next[row]] >= 0:
            same = 0
            if rule == _MOST:
                for other in rows:
                    same += 0 <= start[other] <= at and slots[now.next[other]] == slots[now.next[row]]
            if same > most or (same == most and left[now.next[row]] > left[now.next[best]]):
                slot, most, best = slots[now.next[row]], same, row
    if patience:
        longest = np.int64(0)
        for row in rows:
            if 0 <= start[row] <= at and slots[now.next[row]] == slot:
                longest = max(longest, step.lasts[now.next[row]])
        soon = at + longest // 2
        for row in rows:
            if 0 <= start[row] <= soon and slots[now.next[row]] == slot:
                at = max(at, start[row])
    for row in rows:
        now.is_in[row] = 0 <= start[row] <= at and slots[now.next[row]] == slot
    return at


# Slots by one simple rule: for plans whose times do not depend on them, as their ranks share neither weights nor sums.
#
# Whoever trains may share more than the plan counts with, so that such plans have slots too. They have to be right, and
# they have to cost next to nothing.


@compiled
def quick_slots(
    chunks: Chunks, actions: Actions, times: ChunkTimes, meeting: Int8Array, dp: int, pp: int, placement: StagePlacement
) -> Int64Array:
    """The slot of each action on its stage, int64 [num_actions]: always for what the rank does that has most left.

    The arguments are those of `align_steps`; `meeting`, in which every op needs a slot.
    """
    slots, num_model_stages = np.empty(actions.ops.size, np.int64), times.durations.shape[1]
    for first in range(0, chunks.rank_chunks.size - 1, dp):
        last = first + dp
        if num_model_stages == 1 and not np.any(
            chunks.cp_size[chunks.rank_chunks[first] : chunks.rank_chunks[last]] > 1
        ):
            # Ranks meet for nothing else, so that all of them go from slot to slot at once.
            _most_left_first(chunks, actions, times, meeting, first, dp, slots)
            continue
        own = slice(actions.stages[first * pp], actions.stages[last * pp])
        step = step_of(chunks, actions, times, first, dp, pp, placement)
        kinds = slot_kinds(step, actions.virtual_stages[own], meeting, num_model_stages // pp)
        now = beginning(step, pp)
        play_by_rule(step, now, pp, kinds, LONGEST, 0)
        copy_to(slots[own], now.before)
    return slots


@compiled_part
def _most_left_first(
    chunks: Chunks, actions: Actions, times: ChunkTimes, meeting: Int8Array, first: int, dp: int, slots: Int64Array
) -> None:
    action, left = actions.stages[first : first + dp].copy(), np.zeros(dp, np.int64)
    for row in range(dp):
        base = chunks.rank_chunks[first + row]
        for each in range(action[row], actions.stages[first + row + 1]):
            left[row] += times.durations[actions.ops[each], 0, base + actions.chunk_ids[each]]
    slot = 0
    while True:
        best = -1
        for row in range(dp):
            if action[row] < actions.stages[first + row + 1] and (best < 0 or left[row] > left[best]):
                best = row
        if best < 0:
            break
        op = meeting[actions.ops[action[best]]]
        for row in range(dp):
            each = action[row]
            if each < actions.stages[first + row + 1] and meeting[actions.ops[each]] == op:
                chunk = chunks.rank_chunks[first + row] + actions.chunk_ids[each]
                left[row] -= times.durations[actions.ops[each], 0, chunk]
                slots[each] = slot
                action[row] += 1
        slot += 1


def ends_in_slots(
    chunks: Chunks,
    actions: Actions,
    times: ChunkTimes,
    meeting: Int8Array,
    slots: Int64Array,
    dp: int,
    pp: int,
    placement: StagePlacement,
) -> Int64Array:
    """When each action ends where the slots are given, int64 [num_actions]; -1 of what is never done.

    `slots`: that of each action, int64 [num_actions], where ranks share weights; those that `meeting` needs are some of
    them. The other arguments are those of `align_steps`.
    """
    row = np.repeat(np.arange(actions.stages.size - 1), np.diff(actions.stages))
    stage = row // (dp * pp) * pp + row % pp  # of all steps
    sizes = np.zeros(int(stage.max(initial=-1)) + 1, np.int64)
    np.maximum.at(sizes, stage, slots + 1)
    starts = offsets_of(sizes)
    meets = np.zeros(starts[-1], np.int64)
    meets[(starts[stage] + slots)[meeting[actions.ops] >= 0]] = 1
    counts = offsets_of(meets)
    before = counts[starts[stage] + slots] - counts[starts[stage]]  # [num_actions], those needed that are over
    return simulate_slots(chunks, actions, times, pp, placement, dp, meeting, before)
