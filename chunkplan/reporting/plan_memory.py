"""The memory that a plan is predicted to take: of the fullest GPU, part by part."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from chunkplan.arrays import Int64Array
from chunkplan.cost.memory import Sharding, StageMemory
from chunkplan.cost.model import CostModel
from chunkplan.errors import DataError
from chunkplan.planfile.places import find_step
from chunkplan.planfile.plan import Plan, PlanStep
from chunkplan.planning.config import PlanConfig
from chunkplan.schedule.footprint import fullest_moments
from chunkplan.simulation import planned_actions
from chunkplan.tuning.trial import memory_of_stages, stage_token_bytes


@dataclass(frozen=True, kw_only=True)
class PlanMemory:
    """What a GPU of the fullest stage holds at its fullest moment, and which that is.

    `sharding`: which of optimizer states, gradients and weights are spread over data-parallel ranks. `gpu_bytes`: what
    the GPU has.
    """

    step: int
    dp_rank: int
    stage: int
    sharding: Sharding
    memory: StageMemory
    gpu_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """All of it, and the `total`, for one JSON document."""
        document = asdict(self)
        document["memory"]["total"] = self.memory.total
        return document


def plan_memory(plan: Plan, steps: pl.DataFrame) -> PlanMemory | None:
    """Predict the memory of `plan`, whose `per_step` is `steps`; None where its manifest does not describe the model
    and the GPU it was planned for.

    Looked at are the actions of two steps: the one that retains activations of most tokens, and the one with the
    longest split sequence, whose keys and values take most. Optimizer states are taken to be spread over data-parallel
    ranks, as the runtime does, and weights where times were predicted so.

    Raises:
        DataError: a file is damaged.
    """
    place = str(plan.path / "manifest.json")
    try:
        cost = CostModel.from_dict(plan.manifest["predictions"]["cost_model"], where=place)
    except DataError:
        return None
    candidates = {steps["step"][steps[name].arg_max() or 0] for name in ("peak_retained_tokens", "longest_prefix")}
    found = [_fullest_of_step(find_step(plan, step), plan, cost) for step in sorted(candidates)]
    return max(found, key=lambda each: each.memory.total)


def _fullest_of_step(step: PlanStep, plan: Plan, cost: CostModel) -> PlanMemory:
    names = ("chunk_size", "dp", "pp", "virtual_stages")
    sizes = {name: plan.config[name] for name in names}
    config = PlanConfig(k=1, schedule="interleaved" if sizes["virtual_stages"] > 1 else None, **sizes)
    sharding: Sharding = "weights" if cost.weight_shards > 1 else "optimizer"
    found = [
        PlanMemory(
            step=step.step,
            dp_rank=rank,
            stage=stage,
            sharding=sharding,
            memory=memory,
            gpu_bytes=cost.hardware.memory_bytes,
        )
        for rank in range(config.dp)
        for stage, memory in enumerate(memory_of_stages(config, cost, sharding, _moments(step, rank, config, cost)))
    ]
    return max(found, key=lambda each: each.memory.total)


def _moments(step: PlanStep, rank: int, config: PlanConfig, cost: CostModel) -> Int64Array:
    """What each stage of a rank holds when that takes most bytes, int64 [pp, 3]."""
    chunks = step.chunks.get(rank, [])
    place = f"step {step.step}, rank {rank}"
    moments: Int64Array = fullest_moments(
        planned_actions(step, rank, config.pp, int(config.virtual_stages or 1), len(chunks), place),
        np.array([0, len(chunks)]),
        np.array([-1 if chunk.group_id is None else chunk.group_id for chunk in chunks], np.int32),
        np.array([chunk.num_tokens for chunk in chunks], np.int64),
        config.pp,
        stage_token_bytes(config, cost),
    )[0]
    return moments
