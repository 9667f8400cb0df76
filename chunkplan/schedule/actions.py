"""The representation of schedules: for every pipeline stage of a rank its ops on chunks, in order.

One representation, which schedules write, the simulator times, the validator checks and the runtime does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int8Array, Int32Array, Int64Array, offsets_of
from chunkplan.compiled import compiled, compiled_in_place
from chunkplan.cost.durations import ChunkTimes
from chunkplan.layers import links_before, model_stage_of
from chunkplan.operations import OPS
from chunkplan.planfile.chunks import Chunks

FORWARD, FORWARD_KV, RECOMPUTE, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = (
    OPS.index(op) for op in ("forward", "forward_kv", "recompute", "backward", "backward_input", "backward_weight")
)

#: For compiled loops.
model_stage_at, links_at = compiled(model_stage_of), compiled(links_before)


class Actions(NamedTuple):
    """The actions of some stages, one stage after another.

    `ops` int8, `chunk_ids`, `virtual_stages` int32 [num_actions]; `stages` int64 [num_stages + 1], where each stage's
    begin.
    """

    ops: Int8Array
    chunk_ids: Int32Array
    virtual_stages: Int32Array
    stages: Int64Array


@compiled_in_place
def unit_end(group_id: Int32Array, start: int) -> int:
    """The end of the unit at chunk `start`: a standalone chunk (-1 in `group_id`), or all chunks of a group."""
    stop = start + 1
    while stop < group_id.size and group_id[stop] == group_id[start] >= 0:
        stop += 1
    return stop


@compiled
def empty_actions(keeps: BoolArray, pp: int, num_model_stages: int, splits_backward: bool) -> Actions:
    """Room for the actions of a rank's stages: a forward and a backward, or its halves, and recomputes.

    Of each of the `num_model_stages` on `pp` stages, for each chunk of which it is said whether it keeps: bool [n].
    """
    per_stage = num_model_stages // pp * ((3 if splits_backward else 2) * keeps.size + np.sum(~keeps))
    return Actions(
        np.empty(pp * per_stage, np.int8),
        np.empty(pp * per_stage, np.int32),
        np.zeros(pp * per_stage, np.int32),
        np.arange(pp + 1) * per_stage,
    )


@compiled
def times_of_rank(chunks: Chunks, times: ChunkTimes, rank: int) -> ChunkTimes:
    """The times of the chunks that `chunks_of_rank` has of a rank."""
    return times_of_ranks(chunks, times, rank, rank + 1)


@compiled
def times_of_ranks(chunks: Chunks, times: ChunkTimes, first: int, last: int) -> ChunkTimes:
    """The times of the chunks that `chunks_of_ranks` has of the ranks [first, last)."""
    start, stop = chunks.rank_chunks[first], chunks.rank_chunks[last]
    return ChunkTimes(np.ascontiguousarray(times.durations[:, :, start:stop]), times.link[start:stop])


def join_actions(found: Sequence[Actions]) -> Actions:
    """The actions of some ranks, one after another, as those of all of their stages."""
    starts = offsets_of([actions.ops.size for actions in found])
    stages = [actions.stages[:-1] + start for actions, start in zip(found, starts[:-1], strict=True)]
    return Actions(
        np.concatenate([actions.ops for actions in found]),
        np.concatenate([actions.chunk_ids for actions in found]),
        np.concatenate([actions.virtual_stages for actions in found]),
        np.append(np.concatenate(stages), starts[-1]),
    )


def actions_of_rank(actions: Actions, rank: int, pp: int) -> Actions:
    """The actions of the stages of one rank out of many."""
    start, stop = actions.stages[rank * pp], actions.stages[(rank + 1) * pp]
    return Actions(
        actions.ops[start:stop],
        actions.chunk_ids[start:stop],
        actions.virtual_stages[start:stop],
        actions.stages[rank * pp : (rank + 1) * pp + 1] - start,
    )
