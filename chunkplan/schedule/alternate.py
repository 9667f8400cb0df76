"""One forward, one backward: the rule that all schedules of that name share."""

from __future__ import annotations

from chunkplan.arrays import BoolArray, Int8Array, Int32Array, Int64Array
from chunkplan.compiled import compiled
from chunkplan.schedule.actions import BACKWARD, FORWARD, FORWARD_KV, RECOMPUTE
from chunkplan.schedule.orders import Order, least_forwards


@compiled
def forwards_before(order: Order, warm_up: int, ahead: int) -> Int64Array:
    """How many forwards a stage does before each backward in order, int64 [n].

    The last stage does one forward for each backward after `warm_up` of them, and those that the next backward lacks:
    the whole group of a dependent chunk. The stages before it stay `ahead` of that all the time, so that there always
    is work on its way to the last one. (1F1B that counts backwards alone would lose its lead at the first group: every
    stage would forward the whole group before its first backward, and run in lockstep from then on.)
    """
    least = least_forwards(order)
    for index in range(least.size):
        least[index] = min(max(least[index], index + warm_up) + ahead, least.size)
    return least


@compiled
def alternate(
    order: Order,
    before: Int64Array,
    keeps: BoolArray,
    ops: Int8Array,
    chunk_ids: Int32Array,
    virtual_stages: Int32Array,
) -> None:
    """Write the actions of a stage that does so many forwards `before` each backward in order.

    A stage recomputes from its own saved input, directly before the backward, so nothing is sent twice.

    Args:
        order: of virtual stage x n + chunk, [n x virtual stages].
        keeps: bool [n], chunks that need no recompute.
        ops, chunk_ids, virtual_stages: written to.
    """
    action = forwarded = 0
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
