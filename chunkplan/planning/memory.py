"""The memory of what a configuration plans: what tells its moments apart, and each stage at one of them."""

from __future__ import annotations

from dataclasses import replace

from chunkplan.arrays import Int64Array
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.held import Held, HeldBytes
from chunkplan.cost.host_memory import stage_host_bytes
from chunkplan.cost.memory import StageMemory, held_bytes, split_gradient_bytes, stage_memory
from chunkplan.cost.model import CostModel
from chunkplan.schedule.holdings import ACTIVATIONS, ATTENTION_ON_HOST, KV


def held_bytes_of(config: PlanConfig, cost: CostModel) -> HeldBytes:
    """What stages hold with a configuration, see `HeldBytes`."""
    return held_bytes(
        cost,
        config.pp,
        config.layers(cost.shape.num_layers),
        config.chunk_size,
        shared_by=config.cp_sizes[-1],
        placement=config.placement,
    )


def memory_of_stages(config: PlanConfig, cost: CostModel, moments: Int64Array) -> tuple[StageMemory, ...]:
    """Memory of each stage that holds `moments` int64 [pp, 8], see `fullest_moments`."""
    stages = stage_memory(
        cost,
        dp=config.dp,
        layers=config.layers(cost.shape.num_layers),
        held=[Held(*moment) for moment in moments.tolist()],
        chunk_size=config.chunk_size,
        shared_by=config.cp_sizes[-1],
        placement=config.placement,
    )
    if not config.splits_backwards:
        return stages
    layers = config.layers(cost.shape.num_layers)
    whole = split_gradient_bytes(cost, dp=config.dp, pp=config.pp, layers=layers, placement=config.placement)
    return tuple(
        replace(each, gradients=each.gradients + gradients) for each, gradients in zip(stages, whole, strict=True)
    )


def host_bytes_of(config: PlanConfig, cost: CostModel, moments: Int64Array, retained: Int64Array | None = None) -> int:
    """Host memory of a GPU of the stage that takes most, where stages hold `moments` int64 [pp, 8], see
    `fullest_moments`, and at most the activations of `retained` [pp] tokens; None: of those at these moments."""
    of_stages = stage_host_bytes(
        cost,
        layers=config.layers(cost.shape.num_layers),
        retained_tokens=(moments[:, ACTIVATIONS] if retained is None else retained).tolist(),
        kv_tokens=moments[:, KV].tolist(),
        attention_tokens=moments[:, ATTENTION_ON_HOST].tolist(),
        placement=config.placement,
    )
    return max(of_stages)
