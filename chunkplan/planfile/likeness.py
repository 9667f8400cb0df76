"""Plans that are like another: the same samples in every step, for other ranks."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.shape import ModelShape
from chunkplan.errors import UsageError
from chunkplan.options import in_words, options_of
from chunkplan.planfile.load import evaluation_folder
from chunkplan.planfile.manifest import config_of, how_to_build_beside
from chunkplan.planfile.plan import Plan

#: Options that decide, beside the analysis, which samples a step has.
_SAMPLING = ("global_batch", "last_batch", "seed", "epochs", "holdout", "part", "mix")

#: What may not go with other ranks, stages or layers, and is then left to its default; where one of two has to, the
#: first.
_TIED = ("cp", "stage_layers", "virtual_stages", "schedule")

#: The number of epochs: with more, the same steps come first.
EPOCHS = "plan.epochs"


def samples_of(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries that determine the samples of a plan's steps, as JSON, by the names that messages use.

    Of two plans of which it is the same but for `EPOCHS`, each step that both have is of the same samples.
    """
    config = config_of(manifest)
    return {
        "plan.analysis": manifest["analysis"]["content_hash"],
        **{f"plan.{name}": getattr(config, name) for name in _SAMPLING},
    }


def changed_samples(before: Any, now: Mapping[str, Any]) -> str:
    """The reason why a run of a plan with the samples `before` cannot continue with another plan; "" if it can."""
    if not isinstance(before, Mapping):
        return "it does not say which samples its steps have"
    changed = [name for name in now if before.get(name) != now[name]]
    if EPOCHS in changed and before.get(EPOCHS, 0) < now[EPOCHS]:
        changed.remove(EPOCHS)
    return "; ".join(f"{name} was {in_words(before.get(name))}, is {in_words(now[name])}" for name in changed)


def values_like(
    config: PlanConfig, given: Mapping[str, Any], shape: ModelShape
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The options of a plan like that of `config` for a model, and which of `config` fell back to their defaults.

    The options are what is `given`, and of `config` what was not left to its default there. A default that depends on
    other options is then that of the new ones. Of `_TIED` as few fall back as have to. Sources in `mix` have their
    whole paths.

    Raises:
        UsageError: what is given would give steps other samples, or does not go together.
    """
    options = options_of(PlanConfig)
    for name in _SAMPLING:
        if name in given and given[name] != getattr(config, name):
            raise UsageError(
                f"{options[name].spelled} is {in_words(given[name])}, for the plan it was "
                f"{in_words(getattr(config, name))}: --like keeps which samples each step has",
                hint="leave it out; or leave --like out, for a plan of its own",
            )
    kept = {
        name: getattr(config, name)
        for name, one in options.items()
        if getattr(config, name) != (one.depends(config) if one.depends else one.default)
    }
    tied = [name for name in _TIED if name in kept and name not in given]
    for fallen in chain.from_iterable(combinations(tied, number) for number in range(len(tied) + 1)):
        values = {name: value for name, value in kept.items() if name not in fallen} | dict(given)
        try:
            PlanConfig(**values).check_layers(shape.num_layers, shape.name)
        except UsageError:
            if len(fallen) == len(tied):
                raise
        else:
            break
    return values, fallen


def refuse_to_replace(plan: Path, output: Path) -> None:
    """Raise UsageError where a plan like `plan` would replace it, or what it holds out, or what it is held out of."""
    target = Path(os.path.realpath(output))
    beside = evaluation_folder(target)
    if not target.exists():
        return
    for there, replaced in ((target, plan), (target, evaluation_folder(plan.resolve())), (beside, plan)):
        if there.exists() and replaced.exists() and there.samefile(replaced):
            held_out = f", of which {plan} is held out" * (there is beside)
            raise UsageError(
                f"the new plan would replace {target if held_out else replaced}"
                + (held_out or ", which it is to be like" * (replaced is plan)),
                hint=f"give a new folder, for example --output {shlex.quote(f'{output}-2')}",
            )


def how_to_build_like(plan: Plan, dp: int, pp: int) -> str:
    """The command that builds a plan like `plan` for `dp` ranks of `pp` stages, beside it."""
    asked = {"dp": dp} | ({"pp": pp} if pp != plan.config.pp else {})
    words = [word for name, number in asked.items() for word in (f"--{name}", str(number))]
    return how_to_build_beside(plan.path, "-".join(f"{name}{number}" for name, number in asked.items()), *words)
