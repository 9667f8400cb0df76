"""What the runtime of this version cannot run. The one place that knows: a runtime that learns more changes it."""

from __future__ import annotations

from chunkplan.cost.model import CostModel
from chunkplan.planning.config import PlanConfig


def why_plan_only(config: PlanConfig, cost: CostModel) -> str | None:
    """Why the runtime cannot run a plan as it was timed; None if it can."""
    reasons = []
    if config.dp * config.pp * cost.tp > 1:
        reasons.append("more than one GPU")
    if cost.shape.experts_per_token:
        reasons.append("mixtures of experts")
    if cost.checkpointing != "none":
        reasons.append("checkpointing")
    if cost.kv_offload:
        reasons.append("offload")
    return ", ".join(reasons) or None
