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
    if cost.shape.is_recurrent and config.dp > 1:
        of_states = ["shared sequences"] if config.cp != "off" else []
        of_states += [f"sharded {cost.sharding}"] if cost.shares("gradients") else []
        reasons += [f"{reason} of a recurrent model" for reason in of_states]
    if cost.load_in_4bit and config.dp * config.pp > 1:
        reasons.append("weights in 4 bits on several GPUs")
    if cost.optimizer not in ELEMENTWISE and config.dp > 1:
        reasons.append(f"{cost.optimizer} on several data-parallel ranks")
    return " and ".join(reasons) or None
