"""Slots: one order of collectives for the ranks of a stage that share weights or gradients, with padding.

Ranks that share weights fetch the layers of a stage together, and ranks that share gradients sum them together, so all
of them have to do the same fetches and sums in the same order, whatever their own actions are. A *slot* is such a
collective: one op, on one virtual stage. In it every rank of the stage either runs its next action, if that is the
slot's, or takes part without one, which is a *padding*. Actions that need no slot (`slot_ops_of`) run between slots.

*Nothing deadlocks.* `assign_slots` simulates the step on all stages of all ranks, event by event. An event is a slot of
a stage, or an action beside slots; it starts once its dependencies are done: earlier actions of its ranks, inputs of
these actions from other stages, and, for a shared action, all of its ranks. So the order of events is a topological
order of all dependencies, slots included: a padding depends on nothing but its rank's earlier events. Processes that
run their events in this order cannot wait in a cycle, as the first event of it that is not done waits for nothing that
is not done. And the simulation reaches the end for every plan that is valid without slots, as any action that could be
next there has its slot, and the other ranks of the stage can pad.
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int8Array, Int32Array, Int64Array, offsets_of
from chunkplan.compiled import compiled, compiled_in_place, copy_to
from chunkplan.cost.durations import ChunkTimes
from chunkplan.cost.model import CostModel, Sharding
from chunkplan.layers import STRAIGHT, StagePlacement
from chunkplan.operations import MEETINGS, OPS
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.simulate import (
    SimulationState,
    StepGraph,
    earliest_start,
    initial_state,
    run_events,
    run_slot,
    run_together,
    simulate_slots,
    step_graph,
)

_NEVER = 1 << 62

#: Rules for the op of a slot: the next op of the rank with most work left, or that of most ranks.
LONGEST, _MOST = 0, 1


def slot_ops_of(sharding: Sharding) -> Int8Array:
    """The op of the slot that each op needs (`MEETINGS`), by its code, -1 for none: int8 [num_ops]."""
    slot_of = MEETINGS.get(sharding, {})
    return np.array([OPS.index(slot_of[op]) if op in slot_of else -1 for op in OPS], np.int8)


def slot_ops_on(cost: CostModel, dp: int) -> Int8Array | None:
    """`slot_ops_of` the sharding of `dp` data-parallel ranks; None if they share nothing within a step."""
    return slot_ops_of(cost.sharding) if dp > 1 and cost.shares("gradients") else None


@compiled
def assign_slots(
    chunks: Chunks,
    actions: Actions,
    times: ChunkTimes,
    slot_ops: Int8Array,
    dp: int,
    pp: int,
    placement: StagePlacement = STRAIGHT,
) -> tuple[Int64Array, Int64Array]:
    """Assign slots to the actions of steps: the end of each action, and the slots of its stage before it.

    The `dp` ranks of a step follow one another, as do the steps; chunks, actions and times are as in `simulate`.
    `slot_ops`: see `slot_ops_of`. Of some simple rules that one is taken by which the step is over first. The same
    arguments have the same slots, on every machine.

    Returns:
        int64 [num_actions] both. If an action meets others, the slot after those before it is its own, and it is over
        for all at once. The end of what is never done is -1, as ranks deadlock.
    """
    ends, before = np.empty(actions.ops.size, np.int64), np.empty(actions.ops.size, np.int64)
    for first in range(0, chunks.rank_chunks.size - 1, dp):
        own = slice(actions.stages[first * pp], actions.stages[(first + dp) * pp])
        step = step_graph(chunks, actions, times, first, dp, pp, placement)
        slots = slot_kinds(step, actions.virtual_stages[own], slot_ops, times.durations.shape[1] // pp)
        state = _best_of_rules(step, slots, slot_ops, pp)
        copy_to(ends[own], state.ends)
        copy_to(before[own], state.slots_before)
    return ends, before


@compiled
def slot_kinds(step: StepGraph, virtual_stages: Int32Array, slot_ops: Int8Array, num_virtual_stages: int) -> Int64Array:
    """The op and virtual stage of the slot of each action that needs one, as one number, else -1, by action."""
    kinds = np.empty(step.ops.size, np.int64)
    for action in range(step.ops.size):
        slot = slot_ops[step.ops[action]]
        kinds[action] = slot * num_virtual_stages + virtual_stages[action] if slot >= 0 else -1
    return kinds


@compiled
def _best_of_rules(step: StepGraph, slots: Int64Array, slot_ops: Int8Array, pp: int) -> SimulationState:
    """Simulate a step by each rule and return the state of the fastest."""
    best = initial_state(step, pp)
    if pp == 1 and _same_slots(step, slots):
        before = np.empty(step.ops.size, np.int64)
        for row in range(step.rows.size - 1):
            over = 0
            for action in range(step.rows[row], step.rows[row + 1]):
                before[action] = over
                over += slots[action] >= 0
        run_events(step, best, pp, slot_ops, before)
        return best
    for number in range(4 if step.ops.size else 0):
        state = initial_state(step, pp)
        run_greedy(step, state, pp, slots, number // 2, number % 2)
        if number == 0 or np.max(state.ends) < np.max(best.ends):
            best = state
    return best


@compiled
def _same_slots(step: StepGraph, slots: Int64Array) -> bool:
    """True if all ranks of the only stage have the same slots as far as they go, and wait for nothing else.

    Any rule has the same then, in more time.
    """
    longest = slots[step.rows[np.argmax(np.diff(step.rows))] :]
    for row in range(step.rows.size - 1):
        own = slots[step.rows[row] : step.rows[row + 1]]
        if np.any(own != longest[: own.size]):
            return False
    return not (np.any(step.depends_on != -1) or np.any(step.rendezvous >= 0))


@compiled
def run_greedy(step: StepGraph, state: SimulationState, pp: int, slots: Int64Array, rule: int, patience: int) -> None:
    """Run a step from its beginning, event by event, by one rule.

    `patience`: 1 if a slot waits for ranks that could soon do their own in it, up to half of what it takes, else 0.
    """
    num_rows = step.rows.size - 1
    start = np.full(num_rows, -1, np.int64)  # of each row, see `earliest_start`
    left = np.empty(step.ops.size, np.int64)  # of each action, what it and all after it on its row last
    for row in range(num_rows):
        own = slice(step.rows[row], step.rows[row + 1])
        copy_to(left[own], np.cumsum(step.durations[own][::-1])[::-1])
    stage = -1
    while True:
        for row in range(num_rows):
            if start[row] < 0 or row % pp == stage:
                start[row] = earliest_start(step, state, row, pp)
        at, stage, row = _next_event(state, pp, slots, start)
        if at == _NEVER:
            break
        if row >= 0:
            run_together(step, state, row, at, pp)
        else:
            run_slot(step, state, stage, _fill_slot(step, state, pp, stage, at, slots, start, left, rule, patience), pp)


@compiled_in_place
def _next_event(state: SimulationState, pp: int, slots: Int64Array, start: Int64Array) -> tuple[int, int, int]:
    """The next event: its time, stage, and row if it needs no slot (else -1); `_NEVER` if nothing can begin.

    At one time, actions without a slot come first: after them a slot may have more ranks.
    """
    at, at_stage, at_row = np.int64(_NEVER), -1, -1
    for stage in range(pp):
        free = np.int64(0)  # a slot needs all ranks
        for row in range(stage, state.free_at.size, pp):
            free = max(free, state.free_at[row])
        for row in range(stage, state.free_at.size, pp):
            if start[row] < 0:
                continue
            meets = slots[state.next_action[row]] >= 0
            begin = max(free, start[row]) if meets else start[row]
            if begin < at or (begin == at and at_row < 0 and not meets):
                at, at_stage, at_row = begin, stage, -1 if meets else row
    return int(at), at_stage, at_row


@compiled_in_place
def _fill_slot(
    step: StepGraph,
    state: SimulationState,
    pp: int,
    stage: int,
    at: int,
    slots: Int64Array,
    start: Int64Array,
    left: Int64Array,
    rule: int,
    patience: int,
) -> int:
    """Choose the ranks in the slot of a stage that begins at `at`, or a little later; returns its begin."""
    rows = range(stage, state.free_at.size, pp)
    slot, most, best = np.int64(-1), -1, -1
    for row in rows:
        if 0 <= start[row] <= at and slots[state.next_action[row]] >= 0:
            same = 0
            if rule == _MOST:
                for other in rows:
                    same += 0 <= start[other] <= at and slots[state.next_action[other]] == slots[state.next_action[row]]
            if same > most or (same == most and left[state.next_action[row]] > left[state.next_action[best]]):
                slot, most, best = slots[state.next_action[row]], same, row
    if patience:
        longest = np.int64(0)
        for row in rows:
            if 0 <= start[row] <= at and slots[state.next_action[row]] == slot:
                longest = max(longest, step.durations[state.next_action[row]])
        soon = at + longest // 2
        for row in rows:
            if 0 <= start[row] <= soon and slots[state.next_action[row]] == slot:
                at = max(at, start[row])
    for row in rows:
        state.in_slot[row] = 0 <= start[row] <= at and slots[state.next_action[row]] == slot
    return at


# Slots by one simple rule, for plans whose times do not depend on them, as their ranks shard neither weights nor
# gradients: a trainer may shard more than the plan assumes. They have to be correct and cheap, not fast.


@compiled
def greedy_slots(
    chunks: Chunks,
    actions: Actions,
    times: ChunkTimes,
    slot_ops: Int8Array,
    dp: int,
    pp: int,
    placement: StagePlacement,
) -> Int64Array:
    """Assign slots by one rule, always for the next op of the rank with most work left: int64 [num_actions].

    The arguments are those of `assign_slots`; `slot_ops`, in which every op needs a slot.
    """
    slots, num_model_stages = np.empty(actions.ops.size, np.int64), times.durations.shape[1]
    for first in range(0, chunks.rank_chunks.size - 1, dp):
        last = first + dp
        if num_model_stages == 1 and not np.any(
            chunks.cp_size[chunks.rank_chunks[first] : chunks.rank_chunks[last]] > 1
        ):
            # Ranks meet for nothing else, so that all of them go from slot to slot at once.
            _most_left_first(chunks, actions, times, slot_ops, first, dp, slots)
            continue
        own = slice(actions.stages[first * pp], actions.stages[last * pp])
        step = step_graph(chunks, actions, times, first, dp, pp, placement)
        kinds = slot_kinds(step, actions.virtual_stages[own], slot_ops, num_model_stages // pp)
        state = initial_state(step, pp)
        run_greedy(step, state, pp, kinds, LONGEST, 0)
        copy_to(slots[own], state.slots_before)
    return slots


@compiled
def _most_left_first(
    chunks: Chunks, actions: Actions, times: ChunkTimes, slot_ops: Int8Array, first: int, dp: int, slots: Int64Array
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
        op = slot_ops[actions.ops[action[best]]]
        for row in range(dp):
            each = action[row]
            if each < actions.stages[first + row + 1] and slot_ops[actions.ops[each]] == op:
                chunk = chunks.rank_chunks[first + row] + actions.chunk_ids[each]
                left[row] -= times.durations[actions.ops[each], 0, chunk]
                slots[each] = slot
                action[row] += 1
        slot += 1


def ends_in_slots(
    chunks: Chunks,
    actions: Actions,
    times: ChunkTimes,
    slot_ops: Int8Array,
    slots: Int64Array,
    dp: int,
    pp: int,
    placement: StagePlacement,
) -> Int64Array:
    """End of each action with given slots, int64 [num_actions]; -1 for actions that deadlock.

    `slots`: that of each action, int64 [num_actions], where ranks share weights; those that `slot_ops` needs are a
    subset. The other arguments are those of `assign_slots`.
    """
    row = np.repeat(np.arange(actions.stages.size - 1), np.diff(actions.stages))
    stage = row // (dp * pp) * pp + row % pp  # of all steps
    sizes = np.zeros(int(stage.max(initial=-1)) + 1, np.int64)
    np.maximum.at(sizes, stage, slots + 1)
    starts = offsets_of(sizes)
    meets = np.zeros(starts[-1], np.int64)
    meets[(starts[stage] + slots)[slot_ops[actions.ops] >= 0]] = 1
    counts = offsets_of(meets)
    before = counts[starts[stage] + slots] - counts[starts[stage]]  # [num_actions], those needed that are over
    return simulate_slots(chunks, actions, times, pp, placement, dp, slot_ops, before)
