"""Schedules that follow a rule, each in a file of its own, written for many ranks in one compiled loop."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.schedule.actions import Actions, RankChunks, empty_actions, rank_of
from chunkplan.schedule.algorithm2 import algorithm2
from chunkplan.schedule.interleaved import interleaved_1f1b
from chunkplan.schedule.retained import peak_retained
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.state_aware_1f1b import state_aware_1f1b

ALGORITHM2, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED = range(3)


@compiled
def write_template(template: int, rank: RankChunks, pp: int, actions: Actions) -> None:
    """Write the actions of a rank into `actions`, whose arrays and `stages` are those of `empty_actions`."""
    if template == ALGORITHM2:
        algorithm2(rank, actions)
    elif template == ONE_FORWARD_ONE_BACKWARD:
        state_aware_1f1b(rank, pp, actions)
    else:
        interleaved_1f1b(rank, pp, actions)


@compiled
def follow_template(
    template: int, rank_chunks: Int64Array, chunks: RankChunks, pp: int
) -> tuple[Actions, Int64Array, Int64Array]:
    """The actions of all stages of many ranks, stage after stage; when each action ends, int64 [num_actions]; what each
    stage retains at most, int64 [num_ranks * pp], see `peak_retained`.

    `rank_chunks` int64 [num_ranks + 1]: where each rank's chunks begin in the arrays of `chunks`.
    """
    num_ranks = rank_chunks.size - 1
    num_parts = chunks.durations.shape[1]
    whole = empty_actions(chunks.keeps, pp, num_parts, False)
    stages = np.zeros(num_ranks * pp + 1, np.int64)
    ends = np.empty(whole.ops.size, np.int64)
    retained = np.empty(num_ranks * pp, np.int64)
    first = 0
    for index in range(num_ranks):
        rank = rank_of(chunks, rank_chunks[index], rank_chunks[index + 1])
        actions = empty_actions(rank.keeps, pp, num_parts, False)
        write_template(template, rank, pp, actions)
        mine = slice(first, first + actions.ops.size)
        whole.ops[mine] = actions.ops
        whole.chunk_ids[mine] = actions.chunk_ids
        whole.virtual_stages[mine] = actions.virtual_stages
        ends[mine] = simulate(actions, rank.durations, rank.link)
        retained[index * pp : (index + 1) * pp] = peak_retained(actions, rank.num_tokens, num_parts // pp)
        stages[index * pp + 1 : (index + 1) * pp + 1] = first + actions.stages[1:]
        first += actions.ops.size
    return Actions(whole.ops, whole.chunk_ids, whole.virtual_stages, stages), ends, retained
