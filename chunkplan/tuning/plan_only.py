"""What the runtime of this version cannot run. The one place that knows: a runtime that learns more changes it."""

from __future__ import annotations

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.cost.optimizers import ELEMENTWISE


def why_plan_only(config: PlanConfig, cost: CostModel) -> str | None:
    """Say what the runtime cannot run of a plan, in the time and memory predicted for it; None if it can run all of it.

    On one data-parallel rank there is nothing to shard, and "none" is run as "optimizer", which takes less than was
    predicted. Whether it can run a type of models at all, its own proof says (docs/models.md).
    """
    reasons = ["tensor parallelism"] if cost.tp > 1 else []
    reasons += _of_states(config, cost) if cost.shape.is_recurrent else []
    if cost.load_in_4bit and config.dp * config.pp > 1:
        reasons.append("weights in 4 bits on several GPUs")
    if cost.optimizer not in ELEMENTWISE and config.dp > 1:
        reasons.append(f"{cost.optimizer} on several data-parallel ranks")
    return " and ".join(reasons) or None


def _of_states(config: PlanConfig, cost: CostModel) -> list[str]:
    """Say what the runtime cannot run of a model whose layers keep a state from one part of a sequence to the next."""
    reasons = ["shared sequences"] if config.cp != "off" and config.dp > 1 else []
    reasons += [f"sharded {cost.sharding}"] if config.dp > 1 and cost.shares("gradients") else []
    return [f"{reason} of a recurrent model" for reason in reasons]
