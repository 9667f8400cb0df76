"""State-aware 1F1B of ChunkFlow (arXiv 2503.02356, section 4.3).

1F1B over chunks as micro-batches, with the order of backwards that dependent chunks ask for: descending within a
group. A stage recomputes locally, from its own saved input, directly before the backward, so nothing is sent twice.
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.compiled import compiled
from chunkplan.schedule.actions import BACKWARD, FORWARD, FORWARD_KV, RECOMPUTE, Int8Array, end_of_unit


@compiled
def state_aware_1f1b(
    group_id: Int32Array, keeps: BoolArray, warm_up: int, ops: Int8Array, chunk_ids: Int32Array
) -> None:
    """The actions of the stage that warms up with `warm_up` forwards: of pp stages, stage s with pp - s.

    After that it alternates backward and forward; where the next backward lacks its forward, it forwards instead.
    `group_id` (-1 for standalone) and `keeps` [num_chunks] are those of a rank's chunks; the actions are written to
    `ops` and `chunk_ids`.
    """
    backwards = _backward_order(group_id)
    action = forwarded = backwarded = 0
    backward_is_due = False
    while backwarded < backwards.size:
        chunk = backwards[backwarded]
        if chunk < forwarded and (backward_is_due or forwarded == backwards.size):
            if not keeps[chunk]:
                ops[action], chunk_ids[action] = RECOMPUTE, chunk
                action += 1
            ops[action], chunk_ids[action] = BACKWARD, chunk
            backwarded += 1
            backward_is_due = False
        else:
            ops[action], chunk_ids[action] = FORWARD if keeps[forwarded] else FORWARD_KV, forwarded
            forwarded += 1
            backward_is_due = forwarded >= warm_up
        action += 1


@compiled
def _backward_order(group_id: Int32Array) -> Int64Array:
    """Chunks in order, those of a group descending."""
    order = np.empty(group_id.size, np.int64)
    first = 0
    while first < group_id.size:
        last = end_of_unit(group_id, first)
        for chunk in range(first, last):
            order[chunk] = first + last - 1 - chunk
        first = last
    return order
