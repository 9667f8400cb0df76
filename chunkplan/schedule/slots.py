"""Slots of a plan: when actions end in them, and quick ones for plans whose times do not depend on slots."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int8Array, Int64Array, offsets_of
from chunkplan.compiled import compiled
from chunkplan.cost.durations import ChunkTimes
from chunkplan.layers import StagePlacement
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.alignment import LONGEST, play_by_rule, slot_kinds
from chunkplan.schedule.simulate import beginning, simulate_slots, step_of

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
        slots[own] = now.before
    return slots


@compiled
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
    before = _over_before(actions, meeting, slots, dp, pp)
    return simulate_slots(chunks, actions, times, pp, placement, dp, meeting, before)


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
