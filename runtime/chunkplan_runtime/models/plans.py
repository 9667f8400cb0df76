"""Which plans a model can be run with, and their steps for it."""

from __future__ import annotations

from typing import Any

from chunkplan.errors import UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan
from chunkplan_runtime.feed.stream import PlanStream
from chunkplan_runtime.models.checks import is_bidirectional, kv_shapes, max_positions
from chunkplan_runtime.models.recurrent import is_recurrent
from chunkplan_runtime.sharing import used_blocks


def check_plan(config: Any, plan: Plan, router_loss: str | None = None) -> None:
    """Refuse a plan that a model of this transformers config cannot be run with.

    `router_loss`: what its load-balancing loss is over, if it has one.

    Raises:
        UsageError: the plan splits sequences and the model looks both ways, more processes are to share heads than
            can, or none would count a whole sequence.
    """
    shared = [block.heads for block in used_blocks(plan)]
    if shared and is_recurrent(config):
        raise UsageError(
            f"processes cannot share sequences of a {config.model_type} model, whose layers keep a state",
            where=str(plan.path),
            hint="build the plan with `--cp off`",
        )
    if shared and router_loss == "sequence":
        raise UsageError(
            "with --router-loss sequence processes cannot share sequences, of which none would count a whole one",
            where=str(plan.path),
            hint="build the plan with `--cp off`, or train with `--router-loss batch`",
        )
    (kv_heads, _), _ = kv_shapes(config)
    of_model = {"key and value heads": kv_heads, "heads": getattr(config, "num_attention_heads", kv_heads)}
    uneven = [(num, name, heads) for name, heads in of_model.items() for num in shared if heads % num]
    if uneven:
        num, name, heads = uneven[0]
        raise UsageError(
            f"{num} processes cannot share the model's {heads} {name} evenly",
            where=str(plan.path),
            hint="build the plan with the --model-config of this model",
        )
    if not is_bidirectional(config):
        return
    groups = plan.chunks().column("group_id")
    if groups.null_count < len(groups):
        raise UsageError(
            "the plan splits sequences, and in this model tokens see those that come after them",
            where=str(plan.path),
            hint="build the plan with `--no-split`, and a --chunk-size of the longest sequence",
        )


def plan_stream(config: Any, plan: Plan, analysis: Analysis, *, pin_memory: bool = False) -> PlanStream:
    """The steps of a plan, on one process, for a model of this transformers config.

    Raises:
        UsageError: see `check_plan` and `PlanStream`.
    """
    most = max_positions(config)
    stream = PlanStream(plan, analysis, vocab_size=config.vocab_size, max_positions=most, pin_memory=pin_memory)
    check_plan(config, plan)
    return stream
