"""How long a rank's schedule takes: every action starts when its stage is free and what it waits for is there."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.cost.durations import ChunkTimes
from chunkplan.planfile.chunks import Chunks, chunks_of_rank
from chunkplan.schedule.actions import (
    BACKWARD_WEIGHT,
    FORWARD_KV,
    RECOMPUTE,
    Actions,
    model_stage_at,
    times_of_rank,
)
from chunkplan.schedule.holdings import peak_retained


@compiled
def simulate(actions: Actions, times: ChunkTimes, v_shaped: bool = False) -> Int64Array:
    """When each action of a rank's stages ends, int64 [num_actions], in the unit of `times`.

    A model stage forwards a chunk once the one before it did and the chunk has come over the link between their stages;
    backward, or its input half, the same from the one behind. Recompute and weight halves wait for nothing but their
    stage. Links carry any number of chunks at once. Where stages wait for each other for ever, the actions that are
    never done end at -1. `v_shaped`: where model stages lie, see `model_stage_of`.
    """
    durations, link = times.durations, times.link  # [num_ops, num_model_stages, n], [n]
    pp = actions.stages.size - 1
    num_model_stages = durations.shape[1]
    turn = pp if v_shaped else -1  # the model stage on the same stage as the one before it
    ends = np.full(actions.ops.size, -1, np.int64)  # [num_actions]
    forward_end = np.full((num_model_stages, link.size), -1, np.int64)  # [num_model_stages, n]
    backward_end = np.full((num_model_stages, link.size), -1, np.int64)  # [num_model_stages, n]
    clock = np.zeros(pp, np.int64)
    position = actions.stages[:-1].copy()
    moving = True
    while moving:
        moving = False
        for stage in range(pp):
            while position[stage] < actions.stages[stage + 1]:
                action = position[stage]
                op, chunk = actions.ops[action], actions.chunk_ids[action]
                model_stage = model_stage_at(stage, actions.virtual_stages[action], pp, v_shaped)
                ready = 0
                if op <= FORWARD_KV:
                    if model_stage > 0:
                        ready = arrival(forward_end[model_stage - 1, chunk], link[chunk] * (model_stage != turn), pp)
                elif op != RECOMPUTE and op != BACKWARD_WEIGHT and model_stage + 1 < num_model_stages:
                    ready = arrival(backward_end[model_stage + 1, chunk], link[chunk] * (model_stage + 1 != turn), pp)
                if ready < 0:
                    break
                clock[stage] = max(clock[stage], ready) + durations[op, model_stage, chunk]
                ends[action] = clock[stage]
                if op <= FORWARD_KV:
                    forward_end[model_stage, chunk] = clock[stage]
                elif op != RECOMPUTE and op != BACKWARD_WEIGHT:
                    backward_end[model_stage, chunk] = clock[stage]
                position[stage] += 1
                moving = True
    return ends


@compiled
def simulate_ranks(
    chunks: Chunks, actions: Actions, times: ChunkTimes, pp: int, v_shaped: bool = False
) -> tuple[Int64Array, Int64Array]:
    """The same of many ranks, each for itself; and what each stage retains at most, int64 [num_ranks * pp]."""
    num_ranks = chunks.rank_chunks.size - 1
    ends, retained = np.empty(actions.ops.size, np.int64), np.empty(num_ranks * pp, np.int64)
    for rank in range(num_ranks):
        own = slice(actions.stages[rank * pp], actions.stages[(rank + 1) * pp])
        stages = actions.stages[rank * pp : (rank + 1) * pp + 1] - own.start
        rank_actions = Actions(actions.ops[own], actions.chunk_ids[own], actions.virtual_stages[own], stages)
        ends[own] = simulate(rank_actions, times_of_rank(chunks, times, rank), v_shaped)
        retained[rank * pp : (rank + 1) * pp] = peak_retained(chunks_of_rank(chunks, rank), rank_actions)
    return ends, retained


@compiled
def arrival(sent: int, link: int, pp: int) -> int:
    """When what was sent at `sent` (-1: not yet) is there; model stages on one stage have no link between them."""
    return sent + link if sent >= 0 and pp > 1 else sent
