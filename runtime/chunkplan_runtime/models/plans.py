"""Which plans a model can be run with."""

from __future__ import annotations

from chunkplan.errors import UsageError
from chunkplan.planfile.plan import Plan
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.sharing import blocks_on


def check_plan(model: CausalLM, plan: Plan, dp: int = 1) -> None:
    """Refuse a plan that the model cannot be run with, on `dp` data-parallel processes.

    Raises:
        UsageError: the plan splits sequences and the model looks both ways, or more processes are to share heads of
            keys and values than can.
    """
    kv_heads = model.config.num_key_value_heads
    uneven = [block.heads for block in blocks_on(plan, dp) if kv_heads % block.heads]
    if uneven:
        raise UsageError(
            f"{uneven[0]} processes cannot share the model's {kv_heads} key and value heads evenly",
            where=str(plan.path),
            hint="build the plan with the --model-config of this model",
        )
    if model.is_causal:
        return
    groups = plan.chunks().column("group_id")
    if groups.null_count < len(groups):
        raise UsageError(
            "the plan splits sequences, and in this model tokens see those that come after them",
            where=str(plan.path),
            hint="build the plan with `--no-split`, and a --chunk-size of the longest sequence",
        )
