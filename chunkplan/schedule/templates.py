"""Schedules that follow a rule, written for many ranks in one compiled loop."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.cost.durations import ChunkTimes
from chunkplan.layers import StagePlacement
from chunkplan.planfile.chunks import Chunks, chunks_of_rank
from chunkplan.schedule.actions import (
    BACKWARD,
    FORWARD,
    FORWARD_KV,
    RECOMPUTE,
    Actions,
    backward_order,
    empty_actions,
    end_of_unit,
    times_of_rank,
)
from chunkplan.schedule.orders import Order, alternate, forwards_before
from chunkplan.schedule.simulate import simulate


@compiled
def algorithm2(chunks: Chunks, actions: Actions) -> None:
    """Standalone chunks forward and backward at once; a group forwards ascending, then backwards descending.

    Algorithm 2 of ChunkFlow (arXiv 2503.02356, section 4.2), on one stage.

    Two errata of the pseudocode in circulation are corrected: the *last* K chunks of a group keep their activations,
    and backward (with its recompute) goes in *descending* order, because a chunk's KV gradient is complete only after
    all later chunks have sent theirs.

    Chunks A and B are standalone, C and D the parts of one sequence; K = 1. Capitals are forwards, small letters
    backwards; C is forwarded first without keeping activations, and again before its backward:

        s0 |AAaaaaBBbbbbCCDDddddCCcccc|
    """
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


@compiled
def state_aware_1f1b(chunks: Chunks, pp: int, actions: Actions) -> None:
    """Write the actions of all stages: of pp stages, stage s stays pp - s - 1 forwards ahead of the last one.

    State-aware 1F1B of ChunkFlow (arXiv 2503.02356, section 4.3).

    1F1B over chunks as micro-batches, with the order of backwards that dependent chunks ask for: descending within a
    group. On whole sequences it is plain 1F1B.

    Chunks A and B are standalone, C and D the parts of one sequence; K = 2, time goes right. Capitals are forwards,
    small letters backwards; the stages warm up, alternate, and drain:

        s0 |AABBCCDD............aaaa..bbbb........ddddcccc|
        s1 |..AABBCC........aaaaDDbbbb........ddddcccc....|
        s2 |....AABB....aaaaCCbbbbDD......ddddcccc........|
        s3 |......AAaaaaBBbbbbCC....DDddddcccc............|
    """
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


@compiled
def interleaved_1f1b(chunks: Chunks, times: ChunkTimes, pp: int, actions: Actions) -> None:
    """Write the actions of all stages; stage s runs the model stages s, pp + s, 2 pp + s, ...

    State-aware interleaved 1F1B: every stage has several virtual stages, so that a pipeline fills and drains sooner.

    The interleaved schedule of Megatron-LM (Narayanan et al., arXiv 2104.04473, section 2.2), over chunks as
    micro-batches and with ChunkFlow's (arXiv 2503.02356, section 4.3) order of backwards: descending within a group.

    Chunks A and B are standalone, C and D the parts of one sequence; K = 2, two virtual stages a stage, time goes
    right. Capitals are forwards, small letters backwards:

        s0 |AABBCCDDAABBCCDD............aaaa..bbbb....ddddccccaaaabbbbddddcccc|
        s1 |..AABBCCDDAABBCCDD......aaaa..bbbb....ddddccccaaaabbbbddddcccc....|
        s2 |....AABBCCDDAABBCC..aaaaDDbbbb....ddddccccaaaabbbbddddcccc........|
        s3 |......AABBCCDDAAaaaaBBbbbbCCDDddddccccaaaabbbbddddcccc............|

    Chunks go through in rounds of pp: a round through the first virtual stages of all stages, then through the second
    ones, and so on. Backwards take them the other way around. The last stage warms up with (virtual stages - 1) pp + 1
    forwards, stage s stays 2 (pp - s - 1) ahead of it. Groups that cross rounds can need more: where stages would wait
    for each other in a deadlock, all warm up with another round.
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


ALGORITHM2, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED = range(3)


@compiled
def write_template(template: int, chunks: Chunks, times: ChunkTimes, pp: int, actions: Actions) -> None:
    """Write the actions of a rank into `actions`, whose arrays and `stages` are those of `empty_actions`."""
    if template == ALGORITHM2:
        algorithm2(chunks, actions)
    elif template == ONE_FORWARD_ONE_BACKWARD:
        state_aware_1f1b(chunks, pp, actions)
    else:
        interleaved_1f1b(chunks, times, pp, actions)


@compiled
def follow_template(template: int, chunks: Chunks, times: ChunkTimes, pp: int) -> Actions:
    """The actions of all stages of many ranks, stage after stage."""
    num_ranks = chunks.rank_chunks.size - 1
    num_model_stages = times.durations.shape[1]
    whole = empty_actions(chunks.keeps_activations, pp, num_model_stages, False)
    stages = np.zeros(num_ranks * pp + 1, np.int64)
    start = 0
    for rank in range(num_ranks):
        rank_chunks, rank_times = chunks_of_rank(chunks, rank), times_of_rank(chunks, times, rank)
        actions = empty_actions(rank_chunks.keeps_activations, pp, num_model_stages, False)
        write_template(template, rank_chunks, rank_times, pp, actions)
        own = slice(start, start + actions.ops.size)
        whole.ops[own] = actions.ops
        whole.chunk_ids[own] = actions.chunk_ids
        whole.virtual_stages[own] = actions.virtual_stages
        stages[rank * pp + 1 : (rank + 1) * pp + 1] = start + actions.stages[1:]
        start += actions.ops.size
    return Actions(whole.ops, whole.chunk_ids, whole.virtual_stages, stages)
