"""How many tokens' activations a pipeline stage has to hold at once."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.schedule.actions import BACKWARD, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Actions


@compiled
def peak_retained(actions: Actions, num_tokens: Int64Array, num_virtual: int) -> Int64Array:
    """The most tokens whose activations each stage of a rank retains at any time, int64 [pp].

    A chunk is retained from the start of its forward or recompute to the end of its backward, or of the weight half,
    and counts once for every one of the `num_virtual` virtual stages of a stage that retains it. `num_tokens` int64
    [n], of each chunk.
    """
    pp = actions.stages.size - 1
    peak = np.zeros(pp, np.int64)
    for stage in range(pp):
        is_retained = np.zeros((num_virtual, num_tokens.size), np.bool_)
        retained = np.int64(0)
        for action in range(actions.stages[stage], actions.stages[stage + 1]):
            op, chunk, virtual_stage = actions.ops[action], actions.chunk_ids[action], actions.virtual_stages[action]
            if op in (FORWARD, RECOMPUTE):
                is_retained[virtual_stage, chunk] = True
                retained += num_tokens[chunk]
                peak[stage] = max(peak[stage], retained)
            elif op in (BACKWARD, BACKWARD_WEIGHT) and is_retained[virtual_stage, chunk]:
                is_retained[virtual_stage, chunk] = False
                retained -= num_tokens[chunk]
    return peak
