"""Host memory of the GPUs of each pipeline stage: inputs of layers, keys and values, and attention, that lie there."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from chunkplan.cost.activations import runs_of
from chunkplan.cost.held import KV_GRADIENT_BYTES, kept_attention_bytes
from chunkplan.cost.model import CostModel
from chunkplan.layers import STRAIGHT, StagePlacement, stage_parts


def stage_host_bytes(
    cost: CostModel,
    *,
    layers: Sequence[int],
    retained_tokens: Sequence[int],
    kv_tokens: Sequence[int],
    attention_tokens: Sequence[int],
    placement: StagePlacement = STRAIGHT,
) -> tuple[int, ...]:
    """What a GPU of each stage keeps in host memory at most: inputs of layers, offloaded keys and values with their
    gradients, attention.

    What torch rounds up, as it takes page-locked memory in powers of two, is left out. `retained_tokens`: of
    each stage the most whose activations are there; `kv_tokens`: the most whose keys and values are;
    `attention_tokens`: the most that keep attention there. They may be of different moments. Else the arguments are
    those of `stage_memory`.
    """
    pp = len(retained_tokens)
    stages = []
    parts = stage_parts(runs_of(cost, layers), pp, placement)
    for own, retained, held, kept in zip(parts, retained_tokens, kv_tokens, attention_tokens, strict=True):
        most = max(sum(count for _, level, count in part if level == "offload") for part in own)
        inputs = retained * most * cost.shape.hidden_size * cost.num_bytes / cost.tp
        of_token = sum(count * layer.cached_width for part in own for layer, _, count in part) / cost.tp
        offloaded = held * of_token * (cost.num_bytes + KV_GRADIENT_BYTES) if cost.kv_offload else 0
        stages.append(ceil(inputs + offloaded + kept * max(kept_attention_bytes(cost, own))))
    return tuple(stages)
