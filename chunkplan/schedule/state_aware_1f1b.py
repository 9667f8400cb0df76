"""State-aware 1F1B of ChunkFlow (arXiv 2503.02356, section 4.3).

1F1B over chunks as micro-batches, with the order of backwards that dependent chunks ask for: descending within a
group. On whole sequences it is plain 1F1B.

Chunks A and B are standalone, C and D the parts of one sequence; K = 2, time goes right. Capitals are forwards, small
letters backwards; the stages warm up, alternate, and drain:

    s0 |AABBCCDD............aaaa..bbbb........ddddcccc|
    s1 |..AABBCC........aaaaDDbbbb........ddddcccc....|
    s2 |....AABB....aaaaCCbbbbDD......ddddcccc........|
    s3 |......AAaaaaBBbbbbCC....DDddddcccc............|
"""

from __future__ import annotations

import numpy as np

from chunkplan.compiled import compiled
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import Actions, backward_order
from chunkplan.schedule.alternate import alternate, forwards_before
from chunkplan.schedule.orders import Order


@compiled
def state_aware_1f1b(chunks: Chunks, pp: int, actions: Actions) -> None:
    """Write the actions of all stages: of pp stages, stage s stays pp - s - 1 forwards ahead of the last one."""
    order = Order(np.arange(chunks.keeps_activations.size), backward_order(chunks.group_id))
    for stage in range(pp):
        own = slice(actions.stages[stage], actions.stages[stage + 1])
        alternate(
            order,
            forwards_before(order, 1, pp - stage - 1),
            chunks.keeps_activations,
            actions.ops[own],
            actions.chunk_ids[own],
            actions.virtual_stages[own],
        )
