"""Schedules that follow a rule, each in a file of its own, written for many ranks in one compiled loop."""

from __future__ import annotations

import numpy as np

from chunkplan.compiled import compiled
from chunkplan.cost.durations import ChunkTimes
from chunkplan.planfile.chunks import Chunks, chunks_of_rank
from chunkplan.schedule.actions import Actions, empty_actions, times_of_rank
from chunkplan.schedule.algorithm2 import algorithm2
from chunkplan.schedule.interleaved import interleaved_1f1b
from chunkplan.schedule.state_aware_1f1b import state_aware_1f1b

ALGORITHM2, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED = range(3)


@compiled
def write_template(template: int, chunks: Chunks, times: ChunkTimes, pp: int, actions: Actions) -> None:
    """Write the actions of a rank into `actions`, whose arrays and `stages` are those of `empty_actions`."""
    if template == ALGORITHM2:
        algorithm2(chunks, actions)
    elif template == ONE_FORWARD_ONE_BACKWARD:
        state_aware_1f1b(chunks, pp, actions)
    else:
        interleaved_1f1b(chunks, times, pp, actions)


@compiled
def follow_template(template: int, chunks: Chunks, times: ChunkTimes, pp: int) -> Actions:
    """The actions of all stages of many ranks, stage after stage."""
    num_ranks = chunks.rank_chunks.size - 1
    num_model_stages = times.durations.shape[1]
    whole = empty_actions(chunks.keeps_activations, pp, num_model_stages, False)
    stages = np.zeros(num_ranks * pp + 1, np.int64)
    start = 0
    for rank in range(num_ranks):
        rank_chunks, rank_times = chunks_of_rank(chunks, rank), times_of_rank(chunks, times, rank)
        actions = empty_actions(rank_chunks.keeps_activations, pp, num_model_stages, False)
        write_template(template, rank_chunks, rank_times, pp, actions)
        own = slice(start, start + actions.ops.size)
        whole.ops[own] = actions.ops
        whole.chunk_ids[own] = actions.chunk_ids
        whole.virtual_stages[own] = actions.virtual_stages
        stages[rank * pp + 1 : (rank + 1) * pp + 1] = start + actions.stages[1:]
        start += actions.ops.size
    return Actions(whole.ops, whole.chunk_ids, whole.virtual_stages, stages)
