"""Schedules for the ranks of many steps: Algorithm 2 on one stage, state-aware 1F1B on more."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.compiled import compiled
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.algorithm2 import algorithm2
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.state_aware_1f1b import state_aware_1f1b


@compiled
def schedule_ranks(
    rank_chunks: Int64Array, group_id: Int32Array, keeps: BoolArray, forward: Int64Array, pp: int
) -> tuple[Actions, Int64Array]:
    """The actions of all stages of all ranks, stage after stage, and when each stage is done, int64 [ranks * pp].

    `rank_chunks` int64 [num_ranks + 1]: where each rank's chunks begin; the parts of a group follow one another.
    `group_id` (-1 for standalone), `keeps`, and `forward`, the time of a chunk's forward on one stage: [num_chunks].
    """
    num_ranks = rank_chunks.size - 1
    num_actions = pp * (2 * keeps.size + np.sum(~keeps))
    ops = np.empty(num_actions, np.int8)
    chunk_ids = np.empty(num_actions, np.int32)
    stages = np.zeros(num_ranks * pp + 1, np.int64)
    stage_end = np.zeros(num_ranks * pp, np.int64)
    for rank in range(num_ranks):
        chunks = slice(rank_chunks[rank], rank_chunks[rank + 1])
        per_stage = 2 * keeps[chunks].size + np.sum(~keeps[chunks])
        first = stages[rank * pp]
        for stage in range(pp):
            mine = slice(first + stage * per_stage, first + (stage + 1) * per_stage)
            stages[rank * pp + stage + 1] = mine.stop
            if pp == 1:
                algorithm2(group_id[chunks], keeps[chunks], ops[mine], chunk_ids[mine])
            else:
                state_aware_1f1b(group_id[chunks], keeps[chunks], pp - stage, ops[mine], chunk_ids[mine])
        everything = slice(first, first + pp * per_stage)
        own_stages = stages[rank * pp : rank * pp + pp + 1] - first
        ends = simulate(Actions(ops[everything], chunk_ids[everything], own_stages), forward[chunks])
        stage_end[rank * pp : (rank + 1) * pp] = ends[own_stages[1:] - 1]
    return Actions(ops, chunk_ids, stages), stage_end
