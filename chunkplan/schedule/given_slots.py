"""When actions end in the slots that a plan gives them, whatever part of these its ranks meet in."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array, offsets_of
from chunkplan.compiled import compiled
from chunkplan.cost.durations import ChunkTimes
from chunkplan.planfile.chunks import Chunks, chunks_of_ranks
from chunkplan.schedule.actions import Actions, Int8Array, actions_of_rank, times_of_ranks
from chunkplan.schedule.alignment import _begin, _do, _Now, _start, _Step, _step


def ends_in_slots(
    chunks: Chunks,
    actions: Actions,
    times: ChunkTimes,
    meeting: Int8Array,
    slots: Int64Array,
    dp: int,
    pp: int,
    v_shaped: bool = False,
) -> Int64Array:
    """When each action ends where the slots are given, int64 [num_actions]; -1 of what is never done.

    `slots`: that of each action, int64 [num_actions], where ranks share weights; those that `meeting` needs are some of
    them. The other arguments are those of `align_steps`.
    """
    before, ends = _over_before(actions, meeting, slots, dp, pp), np.empty(actions.ops.size, np.int64)
    for first in range(0, chunks.rank_chunks.size - 1, dp):
        own = slice(*actions.stages[[first * pp, (first + dp) * pp]])
        of_step = chunks_of_ranks(chunks, first, first + dp), actions_of_rank(actions, first // dp, dp * pp)
        step = _step(*of_step, times_of_ranks(chunks, times, first, first + dp), meeting, pp, v_shaped)
        _play_given(step, now := _begin(step, pp), pp, before[own])
        ends[own] = now.ends
    return ends


def _over_before(actions: Actions, meeting: Int8Array, slots: Int64Array, dp: int, pp: int) -> Int64Array:
    """How many of the slots that `meeting` needs are over on its stage when each action begins, int64 [num_actions]."""
    row = np.repeat(np.arange(actions.stages.size - 1), np.diff(actions.stages))
    stage = row // (dp * pp) * pp + row % pp  # of all steps
    sizes = np.zeros(int(stage.max(initial=-1)) + 1, np.int64)
    np.maximum.at(sizes, stage, slots + 1)
    starts = offsets_of(sizes)
    meets = np.zeros(starts[-1], np.int64)
    meets[(starts[stage] + slots)[meeting[actions.ops] >= 0]] = 1
    counts = offsets_of(meets)
    before: Int64Array = counts[starts[stage] + slots] - counts[starts[stage]]
    return before


@compiled
def _play_given(step: _Step, now: _Now, pp: int, before: Int64Array) -> None:
    """Play a step whose slots are given: `before` says how many are over on its stage when an action begins."""
    moving = True
    while moving:
        moving = False
        for row in range(now.next.size):
            while now.next[row] < step.rows[row + 1] and before[now.next[row]] <= now.over[row % pp]:
                now.start[row] = start = _start(step, now, pp, row)
                if step.slots[now.next[row]] < 0 <= start:
                    meets = step.meets[now.next[row]]
                    for other in range(row % pp, now.next.size, pp):
                        is_there = now.next[other] < step.rows[other + 1] and step.meets[now.next[other]] == meets >= 0
                        if other == row or is_there:
                            _do(step, now, other, start + step.durations[now.next[other]], row % pp)
                elif start < 0 or not _meet_given(step, now, pp, row % pp, before):
                    break
                moving = True


@compiled
def _meet_given(step: _Step, now: _Now, pp: int, stage: int, before: Int64Array) -> bool:
    """Play the next slot of a stage, if all that it waits for is known."""
    begin, slot = 0, -1
    for row in range(stage, now.next.size, pp):
        now.start[row] = -1
        begin = max(begin, now.free[row])
        if now.next[row] < step.rows[row + 1] and before[now.next[row]] <= now.over[stage]:
            now.start[row] = _start(step, now, pp, row)
            if step.slots[now.next[row]] < 0 or now.start[row] < 0:
                return False
            begin, slot = max(begin, now.start[row]), step.slots[now.next[row]]
    longest = 0
    for row in range(stage, now.next.size, pp):
        if now.start[row] >= 0:
            longest = max(longest, step.durations[now.next[row]])
    for row in range(stage, now.next.size, pp):
        if now.start[row] >= 0:
            _do(step, now, row, begin + longest, stage)
        else:
            now.free[row] = begin + longest
    now.over[stage] += 1
    return slot >= 0
