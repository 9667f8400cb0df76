"""How long a rank's schedule takes: every action starts when its stage is free and what it waits for is there."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.cost.flops import BACKWARD as BACKWARD_WORK
from chunkplan.schedule.actions import BACKWARD, RECOMPUTE, Actions


@compiled
def simulate(actions: Actions, forward: Int64Array) -> Int64Array:
    """When each action of a rank's stages ends, int64 [num_actions], in the unit of `forward` [num_chunks].

    `forward` is the time of a chunk's forward on one stage. Links take no time. Where stages wait for each other for
    ever, the actions that are never done end at -1.
    """
    pp = actions.stages.size - 1
    ends = np.full(actions.ops.size, -1, np.int64)
    forward_end = np.full((pp, forward.size), -1, np.int64)
    backward_end = np.full((pp, forward.size), -1, np.int64)
    clock = np.zeros(pp, np.int64)
    position = actions.stages[:-1].copy()
    moving = True
    while moving:
        moving = False
        for stage in range(pp):
            while position[stage] < actions.stages[stage + 1]:
                action = position[stage]
                op, chunk = actions.ops[action], actions.chunk_ids[action]
                ready = np.int64(0)  # recompute is local to the stage
                if op == BACKWARD:
                    ready = backward_end[stage + 1, chunk] if stage + 1 < pp else ready
                elif op != RECOMPUTE:
                    ready = forward_end[stage - 1, chunk] if stage > 0 else ready
                if ready < 0:
                    break
                clock[stage] = max(clock[stage], ready) + forward[chunk] * (BACKWARD_WORK if op == BACKWARD else 1)
                ends[action] = clock[stage]
                if op == BACKWARD:
                    backward_end[stage, chunk] = clock[stage]
                elif op != RECOMPUTE:
                    forward_end[stage, chunk] = clock[stage]
                position[stage] += 1
                moving = True
    return ends
