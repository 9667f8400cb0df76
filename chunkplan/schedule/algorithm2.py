"""Algorithm 2 of ChunkFlow (arXiv 2503.02356, section 4.2), on one stage.

Two errata of the pseudocode in circulation are corrected: the *last* K chunks of a group keep their activations, and
backward (with its recompute) goes in *descending* order, because a chunk's KV gradient is complete only after all
later chunks have sent theirs.

Chunks A and B are standalone, C and D the parts of one sequence; K = 1. Capitals are forwards, small letters backwards;
C is forwarded first without keeping activations, and again before its backward:

    s0 |AAaaaaBBbbbbCCDDddddCCcccc|
"""

from __future__ import annotations

from chunkplan.compiled import compiled
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import BACKWARD, FORWARD, FORWARD_KV, RECOMPUTE, Actions, end_of_unit


@compiled
def algorithm2(chunks: Chunks, actions: Actions) -> None:
    """Standalone chunks forward and backward at once; a group forwards ascending, then backwards descending."""
    ops, chunk_ids = actions.ops, actions.chunk_ids
    action = start = 0
    while start < chunks.keeps_activations.size:
        stop = end_of_unit(chunks.group_id, start)
        for chunk in range(start, stop):
            ops[action], chunk_ids[action] = FORWARD if chunks.keeps_activations[chunk] else FORWARD_KV, chunk
            action += 1
        for chunk in range(stop - 1, start - 1, -1):
            if not chunks.keeps_activations[chunk]:
                ops[action], chunk_ids[action] = RECOMPUTE, chunk
                action += 1
            ops[action], chunk_ids[action] = BACKWARD, chunk
            action += 1
        start = stop
