"""Plans that are like another: the same samples in every step, for other ranks."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from chunkplan.config.plan import PlanConfig
from chunkplan.errors import UsageError
from chunkplan.options import options_of
from chunkplan.planfile.manifest import config_of
from chunkplan.planfile.plan import Plan

#: What decides, beside the analysis, which samples a step has.
_SAMPLING = ("global_batch", "last_batch", "seed", "epochs", "holdout", "part", "mix")

#: How many epochs a plan has: with more, the same steps come first.
EPOCHS = "plan.epochs"


def samples_of(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """What decides which samples the steps of a plan have, as JSON has it: by the names that messages have for it.

    Of two plans of which it is the same but for `EPOCHS`, each step that both have is of the same samples.
    """
    config = config_of(manifest)
    return {
        "plan.analysis": manifest["analysis"]["content_hash"],
        **{f"plan.{name}": getattr(config, name) for name in _SAMPLING},
    }


def changed_samples(before: Any, now: Mapping[str, Any]) -> str:
    """Why a run of one plan, of which `samples_of` said `before`, does not go on with another one; "" where it does."""
    if not isinstance(before, Mapping):
        return "it does not say which samples its steps have"
    changed = [name for name in now if before.get(name) != now[name]]
    if EPOCHS in changed and before.get(EPOCHS, 0) < now[EPOCHS]:
        changed.remove(EPOCHS)
    return "; ".join(f"{name} was {before.get(name)}, is {now[name]}" for name in changed)


def values_like(config: PlanConfig, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of a plan like that of `config`: what is `given`, and of that what was not left to its default there.

    A default that depends on other options is then that of the new ones. Sources in `mix` have their whole paths.

    Raises:
        UsageError: what is given would give steps other samples.
    """
    options = options_of(PlanConfig)
    for name in _SAMPLING:
        if name in given and given[name] != getattr(config, name):
            raise UsageError(
                f"{options[name].spelled} is {given[name]!r}, that of the plan is {getattr(config, name)!r}: "
                "--like keeps which samples each step has",
                hint="leave it out; or leave --like out, for a plan of its own",
            )
    kept = {
        name: getattr(config, name)
        for name, one in options.items()
        if one.depends is None or getattr(config, name) != one.resolved(config)
    }
    return {**kept, **given}


def how_to_build_like(plan: Plan, dp: int, *, pp: Literal[1] | None = None) -> str:
    """The command that builds a plan like `plan` for `dp` ranks, beside it; for one stage, if `pp` says so."""
    words = ["chunkplan", "build", "--like", str(plan.path), "--dp", str(dp)]
    if pp is not None:
        words += ["--pp", "1", "--schedule", "algorithm2", "--virtual-stages", "1"]
        words += ["--stage-layers", str(sum(plan.config.stage_layers))] if plan.config.stage_layers else []
    if isinstance(plan.config.cp, int) and dp % plan.config.cp:
        words += ["--cp", "auto"]
    return shlex.join([*words, "--output", str(Path(f"{plan.path}-dp{dp}"))])
