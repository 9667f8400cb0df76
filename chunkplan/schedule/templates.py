"""Schedules that follow a rule: one forward, one backward, for many ranks in one compiled loop."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array
from chunkplan.compiled import compiled, compiled_in_place, copy_to
from chunkplan.cost.durations import ChunkTimes
from chunkplan.layers import StagePlacement
from chunkplan.planfile.chunks import Chunks, chunks_of_rank
from chunkplan.schedule.actions import (
    BACKWARD,
    FORWARD,
    FORWARD_KV,
    RECOMPUTE,
    Actions,
    empty_actions,
    times_of_rank,
    unit_end,
)
from chunkplan.schedule.orders import Order, least_forwards
from chunkplan.schedule.simulate import simulate

#: By schedule how many forwards a stage stays ahead of the one behind it.
TEMPLATES = {"algorithm2": 1, "1f1b": 1, "interleaved": 2}


@compiled
def state_aware_1f1b(
    chunks: Chunks, times: ChunkTimes, pp: int, num_virtual: int, ahead: int, actions: Actions
) -> None:
    """Write the actions of all stages of a rank: each stays `ahead` forwards ahead of the one behind it.

    State-aware 1F1B of ChunkFlow (arXiv 2503.02356, section 4.3): 1F1B over chunks as micro-batches, with the order of
    backwards that dependent chunks ask for: descending within a group. On whole sequences it is plain 1F1B.

    Chunks A and B are standalone, C and D the parts of one sequence; K = 2, time goes right. Capitals are forwards,
    small letters backwards; the stages warm up, alternate, and drain:

        s0 |AABBCCDD............aaaa..bbbb........ddddcccc|
        s1 |..AABBCC........aaaaDDbbbb........ddddcccc....|
        s2 |....AABB....aaaaCCbbbbDD......ddddcccc........|
        s3 |......AAaaaaBBbbbbCC....DDddddcccc............|

    On one stage it is Algorithm 2 (section 4.2): a standalone chunk forward and backward at once; a group forwards
    ascending, then backwards descending. Two errata of the pseudocode in circulation are corrected: the *last* K chunks
    of a group keep their activations, and backward (with its recompute) goes in *descending* order, because a chunk's
    KV gradient is complete only after all later chunks have sent theirs. With K = 1 C is forwarded first without
    keeping activations, and again before its backward:

        s0 |AAaaaaBBbbbbCCDDddddCCcccc|

    With several virtual stages it is the interleaved schedule of Megatron-LM (Narayanan et al., arXiv 2104.04473,
    section 2.2), in which a pipeline fills and drains sooner. Stage s runs the model stages s, pp + s, 2 pp + s, ...;
    here two a stage, and K = 2:

        s0 |AABBCCDDAABBCCDD............aaaa..bbbb....ddddccccaaaabbbbddddcccc|
        s1 |..AABBCCDDAABBCCDD......aaaa..bbbb....ddddccccaaaabbbbddddcccc....|
        s2 |....AABBCCDDAABBCC..aaaaDDbbbb....ddddccccaaaabbbbddddcccc........|
        s3 |......AABBCCDDAAaaaaBBbbbbCCDDddddccccaaaabbbbddddcccc............|

    Chunks go through in rounds of pp: a round through the first virtual stages of all stages, then through the second
    ones, and so on. Backwards take them the other way around. The last stage warms up with (virtual stages - 1) pp + 1
    forwards. Groups that cross rounds can need more: where stages would deadlock, all warm up
    with another round.
    """
    keeps = chunks.keeps_activations
    order = Order(
        _in_rounds(np.arange(keeps.size), pp, num_virtual, False),
        _in_rounds(_backward_order(chunks), pp, num_virtual, True),
    )
    warm_up = (num_virtual - 1) * pp + 1
    while True:
        for stage in range(pp):
            _alternate(order, _forwards_before(order, warm_up, ahead * (pp - stage - 1)), keeps, stage, actions)
        if num_virtual == 1 or warm_up >= order.forwards.size:
            break
        if np.all(simulate(chunks, actions, times, pp, StagePlacement(num_virtual, False), 1) >= 0):
            break
        warm_up += pp


@compiled
def _backward_order(chunks: Chunks) -> Int64Array:
    """Chunks in order, each of a group once those that depend on it are done: int64 [n].

    That is descending where all depend on those before them. In a tree the chunks of a branch are done before the next
    branch begins: they lie on a stack, from which those are taken that nothing more depends on.
    """
    order, stack = np.empty(chunks.group_id.size, np.int64), np.empty(chunks.group_id.size, np.int64)  # [n]
    start = done = 0
    while start < order.size:
        stop = unit_end(chunks.group_id, start)
        height = 0
        for chunk in range(start, stop):
            stack[height] = chunk
            height += 1
            while height > 0 and chunks.last_dependent[stack[height - 1]] <= chunk - start:
                height -= 1
                order[done] = stack[height]
                done += 1
        start = stop
    return order


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


@compiled
def _forwards_before(order: Order, warm_up: int, ahead: int) -> Int64Array:
    """Number of forwards of a stage before each backward in order, int64 [n].

    The last stage does one forward for each backward after `warm_up` of them, and those that the next backward lacks:
    the whole group of a dependent chunk. The stages before it stay `ahead` of that all the time, so that there always
    is work on its way to the last one. (1F1B that counts backwards alone would lose its lead at the first group: every
    stage would forward the whole group before its first backward, and run in lockstep from then on.)
    """
    least = least_forwards(order)
    for index in range(least.size):
        least[index] = min(max(least[index], index + warm_up) + ahead, least.size)
    return least


@compiled_in_place
def _alternate(order: Order, before: Int64Array, keeps: BoolArray, stage: int, actions: Actions) -> None:
    """Write the actions of a stage that does so many forwards `before` each backward in order.

    A stage recomputes from its own saved input, directly before the backward, so nothing is sent twice. `order`: of
    virtual stage x n + chunk, [n x virtual stages]; `keeps`: bool [n], chunks that need no recompute.
    """
    ops, chunk_ids, virtual_stages = actions.ops, actions.chunk_ids, actions.virtual_stages
    action, forwarded = actions.stages[stage], 0
    for index in range(order.backwards.size):
        while forwarded < before[index]:
            virtual_stage, chunk = divmod(order.forwards[forwarded], keeps.size)
            op = FORWARD if keeps[chunk] else FORWARD_KV
            ops[action], chunk_ids[action], virtual_stages[action] = op, chunk, virtual_stage
            forwarded += 1
            action += 1
        virtual_stage, chunk = divmod(order.backwards[index], keeps.size)
        if not keeps[chunk]:
            ops[action], chunk_ids[action], virtual_stages[action] = RECOMPUTE, chunk, virtual_stage
            action += 1
        ops[action], chunk_ids[action], virtual_stages[action] = BACKWARD, chunk, virtual_stage
        action += 1


@compiled
def follow_template(chunks: Chunks, times: ChunkTimes, pp: int, ahead: int) -> Actions:
    """The actions of all stages of many ranks, stage after stage; `ahead`: see `TEMPLATES`."""
    num_ranks, num_model_stages = chunks.rank_chunks.size - 1, times.durations.shape[1]
    whole = empty_actions(chunks.keeps_activations, pp, num_model_stages, False)
    stages = np.zeros(num_ranks * pp + 1, np.int64)
    start = 0
    for rank in range(num_ranks):
        rank_chunks, rank_times = chunks_of_rank(chunks, rank), times_of_rank(chunks, times, rank)
        actions = empty_actions(rank_chunks.keeps_activations, pp, num_model_stages, False)
        state_aware_1f1b(rank_chunks, rank_times, pp, num_model_stages // pp, ahead, actions)
        own = slice(start, start + actions.ops.size)
        copy_to(whole.ops[own], actions.ops)
        copy_to(whole.chunk_ids[own], actions.chunk_ids)
        copy_to(whole.virtual_stages[own], actions.virtual_stages)
        copy_to(stages[rank * pp + 1 : (rank + 1) * pp + 1], start + actions.stages[1:])
        start += actions.ops.size
    return Actions(whole.ops, whole.chunk_ids, whole.virtual_stages, stages)
