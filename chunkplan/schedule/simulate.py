"""When actions end: every one begins as soon as its stage is free and all that it waits for is there.

A step of one or more ranks is played through. What an action waits for:

- **Links.** A model stage forwards a chunk once the one before it did and the chunk has come over the link between
  their stages; backward, or its input half, the same from the one behind. Recompute and weight halves wait for nothing
  but their stage. Links carry any number of chunks at once; model stages on one stage have none between them.
- **Meetings.** What the ranks of a block do with a chunk that they share they begin together, on the same model stage.
  (Half of a backward that is for weights alone they do each by themselves.)
- **Slots**, where ranks share weights or gradients: all that ranks do in one, they begin and end together, and the
  other ranks of the stage take part in it between two of their own actions. Which slots there are is given here;
  `alignment` chooses them, over the same play.
(What goes over the link to host memory is in the durations, see `cost.durations`.)

Where they deadlock, the actions that are never done end at -1.
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


class PlayedStep(NamedTuple):
    """What ranks that follow one another do, by action, [num_actions] each, int64 but for `ops` int8.

    `rows` int64 [num_ranks * pp + 1]: where those of each stage of each rank begin. `lasts`: how long it takes.
    `needs`: the action whose end it waits for, -1 for none, -2 for one that is not there; `links`, what comes after
    that on the way. `meets`: one number for all that ranks begin together, -1 for what one does alone; `blocks`, the
    first of their rows; `sizes`, how many.
    """

    rows: Int64Array
    ops: Int8Array
    lasts: Int64Array
    needs: Int64Array
    links: Int64Array
    meets: Int64Array
    blocks: Int64Array
    sizes: Int64Array


class Now(NamedTuple):
    """Where a play is.

    By row, int64: when it is `free`, and its `next` action; and bool, whether it `is_in` the slot that is to be
    played. By action, int64: its `ends`, -1 if it is not done, and how many slots of its stage were over
    `before` it. By stage, int64: how many slots are `over`.
    """

    free: Int64Array
    next: Int64Array
    is_in: BoolArray
    ends: Int64Array
    before: Int64Array
    over: Int64Array


@compiled
def simulate(
    chunks: Chunks, actions: Actions, times: ChunkTimes, pp: int, placement: StagePlacement, dp: int
) -> Int64Array:
    """When each action of all stages of all ranks ends, int64 [num_actions], in the unit of `times`, without slots.

    The `dp` ranks of a step follow one another, as do the steps; with 1 every rank is played by itself. `placement`:
    where model stages lie, see `model_stage_of`.
    """
    meeting, before = np.full(len(OPS), -1, np.int8), np.empty(0, np.int64)
    return simulate_slots(chunks, actions, times, pp, placement, dp, meeting, before)


@compiled
def simulate_slots(
    chunks: Chunks,
    actions: Actions,
    times: ChunkTimes,
    pp: int,
    placement: StagePlacement,
    dp: int,
    meeting: Int8Array,
    before: Int64Array,
) -> Int64Array:
    """The same with slots.

    Args:
        meeting: the op of the slot that each op needs, see `alignment.meeting_of`.
        before: int64 [num_actions], how many slots of its stage are over in its step when each action begins; if it
            needs one, the one after these is its own. Empty where there are no slots.
    """
    ends = np.empty(actions.ops.size, np.int64)
    for first in range(0, chunks.rank_chunks.size - 1, dp):
        own = slice(actions.stages[first * pp], actions.stages[(first + dp) * pp])
        step = step_of(chunks, actions, times, first, dp, pp, placement)
        now = beginning(step, pp)
        play(step, now, pp, meeting, before[own] if before.size else before)
        copy_to(ends[own], now.ends)
    return ends


@compiled
def step_of(
    chunks: Chunks,
    actions: Actions,
    times: ChunkTimes,
    first: int,
    dp: int,
    pp: int,
    placement: StagePlacement,
) -> PlayedStep:
    """What the `dp` ranks from `first` on do; the arguments are those of `simulate_slots`."""
    start, base = actions.stages[first * pp], chunks.rank_chunks[first]
    rows = actions.stages[first * pp : (first + dp) * pp + 1] - start
    ops = actions.ops[start : start + rows[-1]]
    num_ops, num_model_stages = times.durations.shape[0], times.durations.shape[1]
    n = chunks.rank_chunks[first + dp] - base
    columns = np.empty((6, ops.size), np.int64)  # in one piece, as steps are small and many
    lasts, needs, links, meets, blocks, sizes = columns[0], columns[1], columns[2], columns[3], columns[4], columns[5]
    # Of forwards and backwards, by model stage and chunk; before they are known, `needs` says where they will be here.
    sent_by = np.full(2 * num_model_stages * n, -2, np.int64)
    for row in range(dp * pp):
        rank, stage = divmod(row, pp)
        of_rank = chunks.rank_chunks[first + rank]
        for action in range(rows[row], rows[row + 1]):
            op, number = ops[action], actions.chunk_ids[start + action]
            chunk = of_rank + number
            model_stage = model_stage_at(stage, actions.virtual_stages[start + action], pp, placement)
            lasts[action] = times.durations[op, model_stage, chunk]
            needs[action], links[action], meets[action], blocks[action], sizes[action] = -1, 0, -1, row, 1
            if op != RECOMPUTE and op != BACKWARD_WEIGHT:
                is_forward = op <= FORWARD_KV
                at = (model_stage if is_forward else num_model_stages + model_stage) * n + chunk - base
                sent_by[at] = action
                if model_stage != (0 if is_forward else num_model_stages - 1):
                    needs[action] = at - n if is_forward else at + n
                    border = model_stage if is_forward else model_stage + 1
                    links[action] = times.link[chunk] * links_at(border, pp, placement)
            if dp > 1 and chunks.cp_size[chunk] > 1 and op != BACKWARD_WEIGHT:
                # blocks are nested and come first, so that a shared chunk has one number on all of its ranks
                sizes[action], blocks[action] = chunks.cp_size[chunk], chunks.cp_first_rank[chunk] * pp + stage
                met = chunks.rank_chunks[first + chunks.cp_first_rank[chunk]] + number
                meets[action] = (met * num_model_stages + model_stage) * num_ops + op
    for action in range(ops.size):
        if needs[action] >= 0:
            needs[action] = sent_by[needs[action]]
    return PlayedStep(rows, ops, lasts, needs, links, meets, blocks, sizes)


@compiled
def beginning(step: PlayedStep, pp: int) -> Now:
    """Where nothing is done yet."""
    num_rows = step.rows.size - 1
    return Now(
        np.zeros(num_rows, np.int64),
        step.rows[:-1].copy(),
        np.zeros(num_rows, np.bool_),
        np.full(step.ops.size, -1, np.int64),
        np.zeros(step.ops.size, np.int64),
        np.zeros(pp, np.int64),
    )


@inlined
def start_of(step: PlayedStep, now: Now, row: int, pp: int) -> int:
    """When the next action of a row could begin if it met no slot; -1 if there is none, or that is not known yet."""
    start = np.int64(-1)
    if now.next[row] < step.rows[row + 1]:
        action = now.next[row]
        block = step.blocks[action]
        for other in range(block, block + step.sizes[action] * pp, pp):
            same = now.next[other]
            if same == step.rows[other + 1] or step.meets[same] != step.meets[action]:
                start = np.int64(-1)
                break
            needed, ready = step.needs[same], now.free[other]
            if needed >= 0 and now.ends[needed] >= 0:
                ready = max(ready, now.ends[needed] + step.links[same])
            elif needed != -1:
                start = np.int64(-1)
                break
            start = max(start, ready)
    return int(start)


@inlined
def end_of(step: PlayedStep, now: Now, row: int, begin: int) -> int:
    """When the next action of a row ends that begins at `begin`, and meets no slot."""
    end: int = begin + step.lasts[now.next[row]]
    return end


@inlined
def do(now: Now, row: int, end: int, stage: int) -> None:
    """Do the next action of a row."""
    action = now.next[row]
    now.free[row] = now.ends[action] = end
    now.before[action] = now.over[stage]
    now.next[row] += 1


@inlined
def do_together(step: PlayedStep, now: Now, row: int, begin: int, pp: int) -> None:
    """Do the next action of a row, with all ranks that share its chunk."""
    block, size = step.blocks[now.next[row]], step.sizes[now.next[row]]
    for other in range(block, block + size * pp, pp):
        do(now, other, end_of(step, now, other, begin), row % pp)


@compiled_in_place
def meet(step: PlayedStep, now: Now, stage: int, begin: int, pp: int) -> None:
    """Play a slot of a stage: those who are in it do their next action, and it is over for all when the last is."""
    end = begin
    for row in range(stage, now.free.size, pp):
        if now.is_in[row]:
            end = max(end, end_of(step, now, row, begin))
    for row in range(stage, now.free.size, pp):
        if now.is_in[row]:
            do(now, row, end, stage)
        else:
            now.free[row] = end
    now.over[stage] += 1


@compiled_in_place
def play(step: PlayedStep, now: Now, pp: int, meeting: Int8Array, before: Int64Array) -> None:
    """Play a step from its beginning, in the slots that there are; the arguments are those of `simulate_slots`."""
    moving = True
    while moving:
        moving = False
        for row in range(now.free.size):
            while True:
                start, stage = start_of(step, now, row, pp), row % pp
                if start < 0 or (before.size and before[now.next[row]] > now.over[stage]):
                    break
                if meeting[step.ops[now.next[row]]] < 0:
                    do_together(step, now, row, start, pp)
                else:
                    begin = _slot_begin(step, now, stage, pp, meeting, before)
                    if begin < 0:
                        break
                    meet(step, now, stage, begin, pp)
                moving = True


@compiled_in_place
def _slot_begin(step: PlayedStep, now: Now, stage: int, pp: int, meeting: Int8Array, before: Int64Array) -> int:
    """When the next slot of a stage begins, and in `now` who is in it; -1 if that is not known yet."""
    begin = np.int64(0)
    for row in range(stage, now.free.size, pp):
        action, start = now.next[row], now.free[row]
        now.is_in[row] = action < step.rows[row + 1] and before[action] <= now.over[stage]
        if now.is_in[row]:
            start = start_of(step, now, row, pp) if meeting[step.ops[action]] >= 0 else np.int64(-1)
            if start < 0:
                return -1
        begin = max(begin, start)
    return int(begin)
