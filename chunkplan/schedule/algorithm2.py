"""Algorithm 2 of ChunkFlow (arXiv 2503.02356, section 4.2), on one stage.

Two errata of the pseudocode in circulation are mended: the *last* K chunks of a group keep their activations, and
backward (with its recompute) goes in *descending* order, because a chunk's KV gradient is complete only after all
later chunks have sent theirs.
"""

from __future__ import annotations

from chunkplan.schedule.actions import ChunkStates, StageActions


def algorithm2(chunks: ChunkStates) -> StageActions:
    """Standalone chunks forward and backward at once; a group forwards ascending, then backwards descending."""
    actions: StageActions = []
    for unit in chunks.units():
        actions += [chunks.first_forward(chunk_id) for chunk_id in unit]
        for chunk_id in reversed(unit):
            actions += chunks.backward(chunk_id)
    return actions
