"""State-aware zero-bubble: 1F1B whose backwards are split, so that stages compute gradients of weights while they wait.

Zero Bubble Pipeline Parallelism (Qi et al., arXiv 2401.10241) on the chunks of ChunkFlow (arXiv 2503.02356): only the
gradients of inputs are on the way from stage to stage; those of weights fill what would be bubbles, and the end. Groups
backward in descending order and hold no more chunks than they keep; a chunk's activations are held until its weight
half.

Chunks A and B are standalone, C and D the parts of one sequence; K = 2, time goes right. Capitals are forwards, small
letters the halves of backwards that the stage before waits for, w those of weights:

    s0 |AABBCCDD......aawwbbww..ddccwwww|
    s1 |..AABBCCDD..aawwbbww..ddccwwww..|
    s2 |....AABBCCaaDDbbwwwwddccwwww....|
    s3 |......AAaaBBbbCCDDddccwwwwwwww..|
"""

from __future__ import annotations

import numpy as np

from chunkplan.compiled import compiled
from chunkplan.cost.durations import ChunkTimes
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, Actions, empty_actions
from chunkplan.schedule.holdings import peak_retained
from chunkplan.schedule.list_schedule import Limits, list_schedule
from chunkplan.schedule.orders import least_forwards, limit_forwards, most_forwards, units_by_work
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.state_aware_1f1b import state_aware_1f1b


@compiled
def zero_bubble(chunks: Chunks, times: ChunkTimes, pp: int, actions: Actions) -> None:
    """Write the actions of all stages: the fastest of state-aware 1F1B, its backwards split, and list schedules.

    These take units in different orders, and differ in how far forwards run ahead, whether they go before backwards,
    and how much a weight half may delay what comes next. No stage retains more tokens than that stage of state-aware
    1F1B that retains most.
    """
    memory = _split_1f1b(chunks, pp, actions)
    fastest = int(np.max(simulate(actions, times)))
    n = chunks.keeps_activations.size
    trial = Actions(
        np.empty_like(actions.ops), np.empty_like(actions.chunk_ids), actions.virtual_stages, actions.stages
    )
    limits = Limits(
        np.empty((pp, n), np.int64),
        np.zeros(pp, np.bool_),
        np.full(pp, memory),
        np.full(pp, np.iinfo(np.int64).max),
        np.empty((pp, 0), np.int64),
    )
    for direction in (0, 1, -1):
        order = units_by_work(chunks, times, direction)
        least, most = least_forwards(order), most_forwards(chunks, order, memory)
        # The first one of these is fastest most often; the others by some per cent, sometimes.
        for ahead, forward_first, overrun in ((n, False, 50), (n, False, 75), (n, True, 100), (0, True, 75)):
            limits.forward_first[:] = forward_first
            for stage in range(pp):
                limits.forwards[stage] = limit_forwards(least, most, pp - stage - 1 + ahead)
            end = list_schedule(chunks, times, order, limits, overrun, trial)
            if end < fastest:
                fastest = end
                actions.ops[:], actions.chunk_ids[:] = trial.ops, trial.chunk_ids


@compiled
def _split_1f1b(chunks: Chunks, pp: int, actions: Actions) -> int:
    """Write state-aware 1F1B with both halves of a backward one after the other: the most tokens a stage retains."""
    whole = empty_actions(chunks.keeps_activations, pp, pp, False)
    state_aware_1f1b(chunks, pp, whole)
    action = 0
    for index, op in enumerate(whole.ops):
        actions.ops[action] = BACKWARD_INPUT if op == BACKWARD else op
        actions.chunk_ids[action] = whole.chunk_ids[index]
        action += 1
        if op == BACKWARD:
            actions.ops[action], actions.chunk_ids[action] = BACKWARD_WEIGHT, whole.chunk_ids[index]
            action += 1
    return int(np.max(peak_retained(chunks, whole)))
