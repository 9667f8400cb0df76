"""What stages hold at their fullest moment: activations, saved inputs of chunks, keys and values of split sequences."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.compiled import compiled
from chunkplan.cost.durations import Float64Array
from chunkplan.schedule.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FORWARD_KV,
    RECOMPUTE,
    Actions,
    end_of_unit,
)


@compiled
def fullest_moments(
    actions: Actions,
    rank_chunks: Int64Array,
    group_id: Int32Array,
    num_tokens: Int64Array,
    pp: int,
    token_bytes: Float64Array,
) -> Int64Array:
    """Of each stage of many ranks, what it holds when that takes most bytes, in tokens: int64 [num_ranks, pp, 3].

    First, tokens whose activations it retains, on all its virtual stages together (see `peak_retained`). Second, those
    of saved inputs: of a chunk from its `forward_kv` to its recompute, on each virtual stage; the first model part
    needs but the token ids. Third, those of keys and values: of a group from each chunk's forward to the backward of
    the first chunk, which is the last to be done; they count once, whatever the virtual stages.

    Args:
        rank_chunks: int64 [num_ranks + 1], where each rank's chunks begin in `group_id` (-1 for standalone) and
            `num_tokens` [n].
        token_bytes: [pp, 3], what a token of each kind takes on each stage.
    """
    num_ranks = rank_chunks.size - 1
    moments = np.zeros((num_ranks, pp, 3), np.int64)
    is_first, group_tokens = _groups(rank_chunks, group_id, num_tokens)
    for rank in range(num_ranks):
        for stage in range(pp):
            retained = inputs = kv = np.int64(0)
            most = -1.0
            row = rank * pp + stage
            for action in range(actions.stages[row], actions.stages[row + 1]):
                op, chunk = actions.ops[action], rank_chunks[rank] + actions.chunk_ids[action]
                is_first_part = actions.virtual_stages[action] == 0
                saves = stage > 0 or not is_first_part
                if op in (FORWARD, RECOMPUTE):
                    retained += num_tokens[chunk]
                elif op in (BACKWARD, BACKWARD_WEIGHT):
                    retained -= num_tokens[chunk]
                if op == FORWARD_KV and saves:
                    inputs += num_tokens[chunk]
                elif op == RECOMPUTE and saves:
                    inputs -= num_tokens[chunk]
                if op <= FORWARD_KV and is_first_part and group_id[chunk] >= 0:
                    kv += num_tokens[chunk]
                num_bytes = (
                    retained * token_bytes[stage, 0] + inputs * token_bytes[stage, 1] + kv * token_bytes[stage, 2]
                )
                if num_bytes > most:
                    most = num_bytes
                    moments[rank, stage] = retained, inputs, kv
                if op in (BACKWARD, BACKWARD_INPUT) and is_first_part and is_first[chunk]:
                    kv -= group_tokens[chunk]
    return moments


def fullest(moments: Int64Array, token_bytes: Float64Array) -> tuple[Int64Array, Int64Array]:
    """Of `moments` int64 [n, pp, 3], see `fullest_moments`, the one that takes most bytes on each stage.

    Returns it, int64 [pp, 3], and which of the n it is, int64 [pp].
    """
    most = (moments * token_bytes).sum(axis=2).argmax(axis=0)
    return moments[most, np.arange(most.size)], most


@compiled
def _groups(rank_chunks: Int64Array, group_id: Int32Array, num_tokens: Int64Array) -> tuple[BoolArray, Int64Array]:
    """Whether each chunk is the first of a group, and if so, the group's tokens; [n]."""
    is_first = np.zeros(group_id.size, np.bool_)
    tokens = np.zeros(group_id.size, np.int64)
    for rank in range(rank_chunks.size - 1):
        mine = group_id[: rank_chunks[rank + 1]]
        first = rank_chunks[rank]
        while first < mine.size:
            last = end_of_unit(mine, first)
            if mine[first] >= 0:
                is_first[first] = True
                tokens[first] = np.sum(num_tokens[first:last])
            first = last
    return is_first, tokens
