"""State-aware interleaved 1F1B: every stage has several virtual stages, so that a pipeline fills and drains sooner.

The interleaved schedule of Megatron-LM (Narayanan et al., arXiv 2104.04473, section 2.2), over chunks as micro-batches
and with ChunkFlow's (arXiv 2503.02356, section 4.3) order of backwards: descending within a group.

Chunks A and B are standalone, C and D the parts of one sequence; K = 2, two virtual stages a stage, time goes right.
Capitals are forwards, small letters backwards:

    s0 |AABBCCDDAABBCCDD............aaaa..bbbb....ddddccccaaaabbbbddddcccc|
    s1 |..AABBCCDDAABBCCDD......aaaa..bbbb....ddddccccaaaabbbbddddcccc....|
    s2 |....AABBCCDDAABBCC..aaaaDDbbbb....ddddccccaaaabbbbddddcccc........|
    s3 |......AABBCCDDAAaaaaBBbbbbCCDDddddccccaaaabbbbddddcccc............|
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.cost.durations import ChunkTimes
from chunkplan.layers import StagePlacement
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import Actions, backward_order
from chunkplan.schedule.alternate import alternate, forwards_before
from chunkplan.schedule.orders import Order
from chunkplan.schedule.simulate import simulate


@compiled
def interleaved_1f1b(chunks: Chunks, times: ChunkTimes, pp: int, actions: Actions) -> None:
    """Write the actions of all stages; stage s runs the model stages s, pp + s, 2 pp + s, ...

    Chunks go through in rounds of pp: a round through the first virtual stages of all stages, then through the second
    ones, and so on. Backwards take them the other way around. The last stage warms up with (virtual stages - 1) pp + 1
    forwards, stage s stays 2 (pp - s - 1) ahead of it. Groups that cross rounds can need more: where stages would wait
    for each other for ever, all warm up with another round.
    """
    num_virtual = times.durations.shape[1] // pp
    order = Order(
        _in_rounds(np.arange(chunks.keeps_activations.size), pp, num_virtual, False),
        _in_rounds(backward_order(chunks.group_id), pp, num_virtual, True),
    )
    warm_up = (num_virtual - 1) * pp + 1
    while True:
        for stage in range(pp):
            own = slice(actions.stages[stage], actions.stages[stage + 1])
            alternate(
                order,
                forwards_before(order, warm_up, 2 * (pp - stage - 1)),
                chunks.keeps_activations,
                actions.ops[own],
                actions.chunk_ids[own],
                actions.virtual_stages[own],
            )
        if warm_up >= order.forwards.size or np.all(
            simulate(chunks, actions, times, pp, StagePlacement(num_virtual, False)) >= 0
        ):
            break
        warm_up += pp


@compiled
def _in_rounds(chunks: Int64Array, pp: int, num_virtual: int, descending: bool) -> Int64Array:
    """pp `chunks` at a time, on one virtual stage after the other: [n x num_virtual], as virtual stage x n + chunk."""
    order = np.empty(chunks.size * num_virtual, np.int64)  # [n x num_virtual]
    position = 0
    for first in range(0, chunks.size, pp):
        for turn in range(num_virtual):
            virtual_stage = num_virtual - 1 - turn if descending else turn
            for index in range(first, min(first + pp, chunks.size)):
                order[position] = virtual_stage * chunks.size + chunks[index]
                position += 1
    return order
