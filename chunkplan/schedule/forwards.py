"""Forwards that a loss adds to a step: all chunks, before anything else, for log-probabilities of target tokens.

They leave nothing but keys and values, and run through the pipeline in the order of the plan's own forwards. All ranks
are done before the first of these begins, as the loss is of the whole step.
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int8Array, Int64Array, offsets_of, sum_runs
from chunkplan.config.losses import LOSSES
from chunkplan.cost.durations import ChunkTimes
from chunkplan.cost.model import CostModel
from chunkplan.layers import StagePlacement
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import FORWARD, FORWARD_KV, Actions
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.slots import ends_in_slots


def extra_forwards(loss: str, cost: CostModel, *, has_reference: bool) -> int:
    """Forwards of all chunks that a step has beside those of cross-entropy.

    One more if the loss has a reference model that is the model without its adapters; none for that where the data
    has the log-probabilities.
    """
    described = LOSSES[loss]
    runs_reference = described.needs_reference({}) and cost.lora_rank > 0 and not has_reference
    return described.extra_forwards + runs_reference


def forwards_ns(
    chunks: Chunks,
    actions: Actions,
    times: ChunkTimes,
    dp: int,
    pp: int,
    placement: StagePlacement,
    slot_ops: Int8Array | None = None,
    slots: Int64Array | None = None,
) -> Int64Array:
    """Time of one forward of all chunks of each step on its `dp` ranks, int64 [num_steps].

    `slot_ops`, `slots`: those of the actions where ranks share gradients or weights; see `ends_in_slots`.
    """
    is_forward = (actions.ops == FORWARD) | (actions.ops == FORWARD_KV)
    counts = sum_runs(is_forward.astype(np.int64), actions.stages)
    ops = np.full(int(counts.sum()), FORWARD, np.int8)  # the head runs for both
    alone = Actions(ops, actions.chunk_ids[is_forward], actions.virtual_stages[is_forward], offsets_of(counts))
    if slot_ops is None or slots is None:
        ends = simulate(chunks, alone, times, pp, placement, dp)
    else:
        ends = ends_in_slots(chunks, alone, times, slot_ops, slots[is_forward], dp, pp, placement)
    return np.maximum.reduceat(ends, alone.stages[: -1 : dp * pp])
