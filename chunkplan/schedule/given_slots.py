"""When actions end in the slots that a plan gives them, whatever part of these its ranks meet in."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int8Array, Int64Array, offsets_of
from chunkplan.cost.durations import ChunkTimes
from chunkplan.layers import StagePlacement
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.simulate import simulate_slots


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
    before, moves = _over_before(actions, meeting, slots, dp, pp), np.empty((0, 0, 0), np.int64)
    return simulate_slots(chunks, actions, times, pp, placement, dp, meeting, before, moves)


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
