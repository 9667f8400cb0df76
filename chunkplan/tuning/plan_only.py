"""Lists what the runtime of this version cannot run. The one place to change when the runtime learns more."""

from __future__ import annotations

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.cost.optimizers import ELEMENTWISE


def why_plan_only(config: PlanConfig, cost: CostModel) -> str | None:
    """Return what of a plan, as its time and memory are predicted, the runtime cannot run; None if it runs all of it.

    One data-parallel rank has nothing to shard, and "none" runs as "optimizer", which takes less memory than predicted.
    The types of models that run at all are those of the runtime's own proof (docs/models.md).
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
