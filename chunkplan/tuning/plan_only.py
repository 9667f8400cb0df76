"""What the runtime of this version cannot run. The one place that knows: a runtime that learns more changes it."""

from __future__ import annotations

from chunkplan.cost.model import CostModel
from chunkplan.planning.config import PlanConfig


def why_plan_only(config: PlanConfig, cost: CostModel) -> str | None:
    """Why the runtime cannot run a plan as it was timed; None if it can."""
    return "more than one GPU" if config.dp * config.pp * cost.tp > 1 else None
