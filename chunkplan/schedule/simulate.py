"""Event simulation of steps: every action begins as soon as its stage is free and its dependencies are done.

The dependencies of an action:

- **Links.** A model stage forwards a chunk once the one before it did and the chunk has come over the link between
  their stages; backward, or its input half, the same from the one behind. Recompute and weight halves wait for nothing
  but their stage. Links carry any number of chunks at once; model stages on one stage have none between them.
- **Rendezvous.** The ranks of a block begin an action with a chunk that they share together, on the same model stage.
  (The weight half of a backward each rank runs by itself.)
- **Slots**, where ranks share weights or gradients: the actions of ranks in one slot begin and end together, and the
  other ranks of the stage take part in it between two of their own actions. Slots are given here; `slots` chooses them
  with the same simulation.
(Time on the link to host memory is part of the durations, see `cost.durations`.)

Actions that deadlock end at -1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int8Array, Int64Array
from chunkplan.compiled import compiled, compiled_in_place, copy_to, inlined
from chunkplan.cost.durations import ChunkTimes
from chunkplan.layers import StagePlacement
from chunkplan.operations import OPS
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import (
    BACKWARD_WEIGHT,
    FORWARD_KV,
    RECOMPUTE,
    Actions,
    links_at,
    model_stage_at,
)


class StepGraph(NamedTuple):
    """Dependencies and durations of the actions of consecutive ranks, [num_actions] each, int64 but for `ops` int8.

    `rows` int64 [num_ranks * pp + 1]: where the actions of each row, a stage of a rank, begin. `depends_on`: the action
    whose end an action waits for, -1 for none, -2 for one that does not exist; `links`: the time on links after it.
    `rendezvous`: one number for actions that several ranks begin together, -1 for an action of one rank; `first_row`:
    the first of their rows; `num_ranks`: how many ranks they are.
    """

    rows: Int64Array
    ops: Int8Array
    durations: Int64Array
    depends_on: Int64Array
    links: Int64Array
    rendezvous: Int64Array
    first_row: Int64Array
    num_ranks: Int64Array


class SimulationState(NamedTuple):
    """State of a simulation.

    By row, int64: the time at which it is free, `free_at`, and its `next_action`; and bool `in_slot`: whether it takes
    part in the slot that runs next. By action, int64: `ends`, -1 until it is done, and `slots_before`: the slots of its
    stage that are done before it. By stage, int64: `slots_done`.
    """

    free_at: Int64Array
    next_action: Int64Array
    in_slot: BoolArray
    ends: Int64Array
    slots_before: Int64Array
    slots_done: Int64Array


@compiled
def simulate(
    chunks: Chunks, actions: Actions, times: ChunkTimes, pp: int, placement: StagePlacement, dp: int
) -> Int64Array:
    """Simulate without slots: the end of each action of all ranks, int64 [num_actions], in the unit of `times`.

    The `dp` ranks of a step follow one another, as do the steps; with 1 every rank is simulated alone. `placement`:
    that of model stages, see `model_stage_of`.
    """
    slot_ops, before = np.full(len(OPS), -1, np.int8), np.empty(0, np.int64)
    return simulate_slots(chunks, actions, times, pp, placement, dp, slot_ops, before)


@compiled
def simulate_slots(
    chunks: Chunks,
    actions: Actions,
    times: ChunkTimes,
    pp: int,
    placement: StagePlacement,
    dp: int,
    slot_ops: Int8Array,
    before: Int64Array,
) -> Int64Array:
    """Simulate with slots: the end of each action.

    Args:
        slot_ops: the op of the slot that each op needs, see `slots.slot_ops_of`.
        before: int64 [num_actions], the slots of its stage and step that are done when each action begins; an action
            that needs a slot has the next one. Empty without slots.
    """
    ends = np.empty(actions.ops.size, np.int64)
    for first in range(0, chunks.rank_chunks.size - 1, dp):
        own = slice(actions.stages[first * pp], actions.stages[(first + dp) * pp])
        step = step_graph(chunks, actions, times, first, dp, pp, placement)
        state = initial_state(step, pp)
        run_events(step, state, pp, slot_ops, before[own] if before.size else before)
        copy_to(ends[own], state.ends)
    return ends


@compiled
def step_graph(
    chunks: Chunks,
    actions: Actions,
    times: ChunkTimes,
    first: int,
    dp: int,
    pp: int,
    placement: StagePlacement,
) -> StepGraph:
    """The graph of the `dp` ranks from `first` on; the arguments are those of `simulate_slots`."""
    start, base = actions.stages[first * pp], chunks.rank_chunks[first]
    rows = actions.stages[first * pp : (first + dp) * pp + 1] - start
    ops = actions.ops[start : start + rows[-1]]
    num_ops, num_model_stages = times.durations.shape[0], times.durations.shape[1]
    n = chunks.rank_chunks[first + dp] - base
    columns = np.empty((6, ops.size), np.int64)  # in one piece, as steps are small and many
    durations, depends_on, links = columns[0], columns[1], columns[2]
    rendezvous, first_row, num_ranks = columns[3], columns[4], columns[5]
    # The forward and backward action of each model stage and chunk; until it is complete, `depends_on` indexes it.
    sent_by = np.full(2 * num_model_stages * n, -2, np.int64)
    for row in range(dp * pp):
        rank, stage = divmod(row, pp)
        of_rank = chunks.rank_chunks[first + rank]
        for action in range(rows[row], rows[row + 1]):
            op, number = ops[action], actions.chunk_ids[start + action]
            chunk = of_rank + number
            model_stage = model_stage_at(stage, actions.virtual_stages[start + action], pp, placement)
            durations[action] = times.durations[op, model_stage, chunk]
            depends_on[action], links[action] = -1, 0
            rendezvous[action], first_row[action], num_ranks[action] = -1, row, 1
            if op != RECOMPUTE and op != BACKWARD_WEIGHT:
                is_forward = op <= FORWARD_KV
                at = (model_stage if is_forward else num_model_stages + model_stage) * n + chunk - base
                sent_by[at] = action
                if model_stage != (0 if is_forward else num_model_stages - 1):
                    depends_on[action] = at - n if is_forward else at + n
                    border = model_stage if is_forward else model_stage + 1
                    links[action] = times.link[chunk] * links_at(border, pp, placement)
            if dp > 1 and chunks.cp_size[chunk] > 1 and op != BACKWARD_WEIGHT:
                # blocks are nested and come first, so that a shared chunk has one number on all of its ranks
                num_ranks[action], first_row[action] = chunks.cp_size[chunk], chunks.cp_first_rank[chunk] * pp + stage
                met = chunks.rank_chunks[first + chunks.cp_first_rank[chunk]] + number
                rendezvous[action] = (met * num_model_stages + model_stage) * num_ops + op
    for action in range(ops.size):
        if depends_on[action] >= 0:
            depends_on[action] = sent_by[depends_on[action]]
    return StepGraph(rows, ops, durations, depends_on, links, rendezvous, first_row, num_ranks)


@compiled
def initial_state(step: StepGraph, pp: int) -> SimulationState:
    """The state at the beginning of a step."""
    num_rows = step.rows.size - 1
    return SimulationState(
        np.zeros(num_rows, np.int64),
        step.rows[:-1].copy(),
        np.zeros(num_rows, np.bool_),
        np.full(step.ops.size, -1, np.int64),
        np.zeros(step.ops.size, np.int64),
        np.zeros(pp, np.int64),
    )


@inlined
def earliest_start(step: StepGraph, state: SimulationState, row: int, pp: int) -> int:
    """The earliest start of the next action of a row without slots; -1 if there is none, or if it is not known yet."""
    start = np.int64(-1)
    if state.next_action[row] < step.rows[row + 1]:
        action = state.next_action[row]
        block = step.first_row[action]
        for other in range(block, block + step.num_ranks[action] * pp, pp):
            same = state.next_action[other]
            if same == step.rows[other + 1] or step.rendezvous[same] != step.rendezvous[action]:
                start = np.int64(-1)
                break
            needed, ready = step.depends_on[same], state.free_at[other]
            if needed >= 0 and state.ends[needed] >= 0:
                ready = max(ready, state.ends[needed] + step.links[same])
            elif needed != -1:
                start = np.int64(-1)
                break
            start = max(start, ready)
    return int(start)


@inlined
def end_time(step: StepGraph, state: SimulationState, row: int, begin: int) -> int:
    """The end of the next action of a row if it begins at `begin` without a slot."""
    end: int = begin + step.durations[state.next_action[row]]
    return end


@inlined
def run_action(state: SimulationState, row: int, end: int, stage: int) -> None:
    """Run the next action of a row."""
    action = state.next_action[row]
    state.free_at[row] = state.ends[action] = end
    state.slots_before[action] = state.slots_done[stage]
    state.next_action[row] += 1


@inlined
def run_together(step: StepGraph, state: SimulationState, row: int, begin: int, pp: int) -> None:
    """Run the next action of a row on all ranks that share its chunk."""
    block, size = step.first_row[state.next_action[row]], step.num_ranks[state.next_action[row]]
    for other in range(block, block + size * pp, pp):
        run_action(state, other, end_time(step, state, other, begin), row % pp)


@compiled_in_place
def run_slot(step: StepGraph, state: SimulationState, stage: int, begin: int, pp: int) -> None:
    """Run a slot of a stage: the rows in it run their next action, and it ends for all rows when the last one does."""
    end = begin
    for row in range(stage, state.free_at.size, pp):
        if state.in_slot[row]:
            end = max(end, end_time(step, state, row, begin))
    for row in range(stage, state.free_at.size, pp):
        if state.in_slot[row]:
            run_action(state, row, end, stage)
        else:
            state.free_at[row] = end
    state.slots_done[stage] += 1


@compiled_in_place
def run_events(step: StepGraph, state: SimulationState, pp: int, slot_ops: Int8Array, before: Int64Array) -> None:
    """Run a step from its beginning in given slots; the arguments are those of `simulate_slots`."""
    moving = True
    while moving:
        moving = False
        for row in range(state.free_at.size):
            while True:
                start, stage = earliest_start(step, state, row, pp), row % pp
                if start < 0 or (before.size and before[state.next_action[row]] > state.slots_done[stage]):
                    break
                if slot_ops[step.ops[state.next_action[row]]] < 0:
                    run_together(step, state, row, start, pp)
                else:
                    begin = _slot_begin(step, state, stage, pp, slot_ops, before)
                    if begin < 0:
                        break
                    run_slot(step, state, stage, begin, pp)
                moving = True


@compiled_in_place
def _slot_begin(
    step: StepGraph, state: SimulationState, stage: int, pp: int, slot_ops: Int8Array, before: Int64Array
) -> int:
    """The begin of the next slot of a stage, and in `state` the rows in it; -1 if it is not known yet."""
    begin = np.int64(0)
    for row in range(stage, state.free_at.size, pp):
        action, start = state.next_action[row], state.free_at[row]
        state.in_slot[row] = action < step.rows[row + 1] and before[action] <= state.slots_done[stage]
        if state.in_slot[row]:
            start = earliest_start(step, state, row, pp) if slot_ops[step.ops[action]] >= 0 else np.int64(-1)
            if start < 0:
                return -1
        begin = max(begin, start)
    return int(begin)
