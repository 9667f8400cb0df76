"""What a schedule is: for every pipeline stage of a rank, what it does with which chunk, in order.

One representation, which schedules write, the simulator times, the validator checks and the runtime does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.compiled import compiled
from chunkplan.operations import OPS

Int8Array = npt.NDArray[np.int8]

FORWARD, FORWARD_KV, RECOMPUTE, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = (
    OPS.index(op) for op in ("forward", "forward_kv", "recompute", "backward", "backward_input", "backward_weight")
)


class RankChunks(NamedTuple):
    """The chunks of one data-parallel rank in one step, in their order; the parts of a group follow one another.

    `group_id` int32 (-1 for standalone), `keeps` bool (its activations, from its first forward on), `num_tokens` int64
    [n]. `durations` int64 [num_ops, num_parts, n] is the time of each action by op code and model part (virtual stage
    x pp + stage); `link` int64 [n] that of a chunk's way from one stage to another.
    """

    group_id: Int32Array
    keeps: BoolArray
    num_tokens: Int64Array
    durations: Int64Array
    link: Int64Array


class Actions(NamedTuple):
    """The actions of some stages, one stage after another.

    `ops` int8, `chunk_ids`, `virtual_stages` int32 [num_actions]; `stages` int64 [num_stages + 1], where each stage's
    begin.
    """

    ops: Int8Array
    chunk_ids: Int32Array
    virtual_stages: Int32Array
    stages: Int64Array


@compiled
def end_of_unit(group_id: Int32Array, first: int) -> int:
    """Where what begins with chunk `first` ends: a standalone chunk (-1 in `group_id`), or all chunks of a group."""
    last = first + 1
    while last < group_id.size and group_id[last] == group_id[first] >= 0:
        last += 1
    return last


@compiled
def backward_order(group_id: Int32Array) -> Int64Array:
    """Chunks in order, those of a group descending: int64 [n]."""
    order = np.empty(group_id.size, np.int64)
    first = 0
    while first < group_id.size:
        last = end_of_unit(group_id, first)
        for chunk in range(first, last):
            order[chunk] = first + last - 1 - chunk
        first = last
    return order


@compiled
def empty_actions(keeps: BoolArray, pp: int, num_parts: int, splits_backward: bool) -> Actions:
    """Room for the actions of a rank's stages: a forward and a backward, or its halves, and recomputes of each part."""
    per_stage = num_parts // pp * ((3 if splits_backward else 2) * keeps.size + np.sum(~keeps))
    return Actions(
        np.empty(pp * per_stage, np.int8),
        np.empty(pp * per_stage, np.int32),
        np.zeros(pp * per_stage, np.int32),
        np.arange(pp + 1) * per_stage,
    )


@compiled
def rank_of(chunks: RankChunks, first: int, last: int) -> RankChunks:
    """The chunks from `first` to before `last`."""
    return RankChunks(
        chunks.group_id[first:last],
        chunks.keeps[first:last],
        chunks.num_tokens[first:last],
        np.ascontiguousarray(chunks.durations[:, :, first:last]),
        chunks.link[first:last],
    )
