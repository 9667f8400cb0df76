"""How long the ranks of a step take together, where some share chunks: an action with one starts when all are there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.cost.durations import ChunkTimes
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import BACKWARD_WEIGHT, FORWARD_KV, RECOMPUTE, Actions, Int8Array, model_stage_at
from chunkplan.schedule.simulate import arrival


class StepRanks(NamedTuple):
    """What all ranks of a step do, which follow one another in `chunks`.

    `ends` is that of `simulate_steps`, or where ranks meet in slots for what `meeting` says
    (`alignment.meeting_of`), that of `alignment.align`.
    """

    chunks: Chunks
    times: ChunkTimes
    actions: Actions
    ends: Int64Array
    meeting: Int8Array | None = None


@compiled
def simulate_steps(
    chunks: Chunks, actions: Actions, times: ChunkTimes, dp: int, pp: int, v_shaped: bool = False
) -> Int64Array:
    """When each action of all stages of all ranks ends, int64 [num_actions], in the unit of `times`.

    The `dp` ranks of a step follow one another. As `simulate`, and besides: what the ranks of a block do with a chunk
    that they share, on the same model stage, they begin together. (Half of a backward that is for weights alone they do
    each by themselves.) Where processes wait for each other for ever, the actions that are never done end at -1.
    """
    ends = np.full(actions.ops.size, -1, np.int64)  # [num_actions]
    for step in range((chunks.rank_chunks.size - 1) // dp):
        _simulate_step(chunks, actions, times, step, dp, pp, v_shaped, ends)
    return ends


@compiled
def _simulate_step(
    chunks: Chunks, actions: Actions, times: ChunkTimes, step: int, dp: int, pp: int, v_shaped: bool, ends: Int64Array
) -> None:
    first = chunks.rank_chunks[step * dp]
    n = chunks.rank_chunks[(step + 1) * dp] - first
    num_ops, num_model_stages = times.durations.shape[0], times.durations.shape[1]
    turn = pp if v_shaped else -1  # the model stage on the same stage as the one before it
    forward_end = np.full((num_model_stages, n), -1, np.int64)
    backward_end = np.full((num_model_stages, n), -1, np.int64)
    there = np.zeros((num_ops, num_model_stages, n), np.int64)  # by the chunk's number on the first rank that shares it
    latest = np.zeros((num_ops, num_model_stages, n), np.int64)
    is_waiting = np.zeros(dp * pp, np.bool_)
    clock = np.zeros(dp * pp, np.int64)
    position = actions.stages[step * dp * pp : (step + 1) * dp * pp].copy()
    moving = True
    while moving:
        moving = False
        for row in range(dp * pp):
            rank, stage = divmod(row, pp)
            base = chunks.rank_chunks[step * dp + rank]
            while position[row] < actions.stages[step * dp * pp + row + 1]:
                action = position[row]
                op = actions.ops[action]
                chunk = base + actions.chunk_ids[action]
                model_stage = model_stage_at(stage, actions.virtual_stages[action], pp, v_shaped)
                place, link = chunk - first, times.link[chunk]
                ready = 0
                if op <= FORWARD_KV:
                    if model_stage > 0:
                        ready = arrival(forward_end[model_stage - 1, place], link * (model_stage != turn), pp)
                elif op != RECOMPUTE and op != BACKWARD_WEIGHT and model_stage + 1 < num_model_stages:
                    ready = arrival(backward_end[model_stage + 1, place], link * (model_stage + 1 != turn), pp)
                if ready < 0:
                    break
                start = max(clock[row], ready)
                if chunks.cp_size[chunk] > 1 and op != BACKWARD_WEIGHT:
                    # blocks are nested and come first, so that a shared chunk has one number on all of its ranks
                    met = (
                        chunks.rank_chunks[step * dp + chunks.cp_first_rank[chunk]] + actions.chunk_ids[action] - first
                    )
                    if not is_waiting[row]:
                        there[op, model_stage, met] += 1
                        latest[op, model_stage, met] = max(latest[op, model_stage, met], start)
                        is_waiting[row] = True
                        moving = True
                    if there[op, model_stage, met] < chunks.cp_size[chunk]:
                        break
                    start = latest[op, model_stage, met]
                    is_waiting[row] = False
                clock[row] = start + times.durations[op, model_stage, chunk]
                ends[action] = clock[row]
                if op <= FORWARD_KV:
                    forward_end[model_stage, place] = clock[row]
                elif op != RECOMPUTE and op != BACKWARD_WEIGHT:
                    backward_end[model_stage, place] = clock[row]
                position[row] += 1
                moving = True
