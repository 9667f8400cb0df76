"""Whether a run may go on from a checkpoint: with the same samples, model and way of learning, as far as it was to go.

Its plan may be another one whose steps have the same samples (`samples_of`), for other ranks or of more epochs. It may
end after another number of steps where those that are done had the same learning rates, so that it is then the run that
it would have been from the start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.files.json_file import read_json
from chunkplan.options import options_of
from chunkplan.planfile.likeness import EPOCHS, changed_samples, samples_of
from chunkplan.planfile.load import load_to_rebuild
from chunkplan.quantities import counted
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.training.checkpoint import CheckpointState, read_state
from chunkplan_runtime.training.config import EARLIER, TrainConfig, learning_rate_factor
from chunkplan_runtime.training.run_folder import RunFolder, shorten
from chunkplan_runtime.training.setup import TrainingData

#: The options that say no more than after how many steps a run ends, by flag.
_ENDS = {"--max-steps": "max_steps", "--max-epochs": "max_epochs"}


@dataclass(frozen=True)
class Earlier:
    """A run that goes on: its last checkpoint, and what that says; `num_steps`: how many it was to have."""

    checkpoint: Path
    state: CheckpointState
    num_steps: int


def find_earlier(folder: RunFolder, config: TrainConfig, data: TrainingData, job: Job) -> Earlier | None:
    """The run in `folder` that is to go on; None where it has no checkpoint.

    Raises:
        UsageError: it is finished, and has all the steps that are asked for.
        DataError: its last checkpoint is damaged.
    """
    found = next(reversed(folder.checkpoints()), None), folder.final.exists()
    checkpoint, is_finished = job.broadcast_object(found)
    if checkpoint is None:
        return None
    state = read_state(checkpoint)
    if (earlier := state["fixed"].pop("plan", None)) is not None:
        state["fixed"] |= _of_earlier_plan(folder, earlier)
    fixed = _fixed_before(state, _ENDS)
    before = {field: fixed[flag] for flag, field in _ENDS.items()}
    if epochs := fixed.get(EPOCHS):
        before["max_epochs"] = min(before["max_epochs"] or epochs, epochs)
    num_steps = data.num_steps(replace(config, **before))
    is_like = not changed_samples(fixed, samples_of(data.plan.manifest))
    if is_finished and is_like and data.num_steps(config) <= num_steps:
        raise _no_more(folder, config, data, num_steps)
    return Earlier(checkpoint, state, num_steps)


def _of_earlier_plan(folder: RunFolder, content_hash: Any) -> Mapping[str, Any]:
    """`samples_of` a run of an earlier version, which named its plan by its hash; nothing if it is gone."""
    try:
        plan = load_to_rebuild(read_json(folder.config, hint="")["config"]["plan"])
    except (ChunkplanError, OSError, LookupError, TypeError):
        return {}
    return samples_of(plan.manifest) if plan.content_hash == content_hash else {}


def _no_more(folder: RunFolder, config: TrainConfig, data: TrainingData, num_steps: int) -> UsageError:
    """The error of a finished run that is to go on, and has all that is asked for, or all that its plan has."""
    epochs, steps = data.plan.manifest["epochs"], data.plan.manifest["totals"]["num_steps"]
    asked = {"--max-epochs": (config.max_epochs, epochs), "--max-steps": (config.max_steps, steps)}
    more = [f"{flag} is {number:,}" for flag, (number, most) in asked.items() if number and number > most]
    if not more:
        return folder.finished(f"no more than its {num_steps:,} steps are asked for")
    return folder.finished(
        f"its plan has {counted(epochs, 'epoch')}, {counted(steps, 'step')}: {', '.join(more)}",
        hint="build the plan again with more --epochs, and nothing else changed: the same command goes on then",
    )


def refuse_other_run(earlier: Earlier, fixed: Mapping[str, Any], config: TrainConfig, num_steps: int) -> None:
    """Refuse to go on with other samples, another model or way of learning; `fixed` are these now, by name.

    Raises:
        UsageError: naming all that differ.
    """
    now = json.loads(json.dumps(fixed))
    before = _fixed_before(earlier.state, now)
    differ = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    ends = {*_ENDS, *([EPOCHS] if before.get(EPOCHS, 0) <= now[EPOCHS] else [])}
    hint = "resume with what it was started with, or start anew in another --output"
    if any(name in ends for name in differ):
        why_not = _why_it_ends_there(earlier, config, num_steps)
        differ = [name for name in differ if why_not or name not in ends]
        hint = f"{why_not}: {hint}" if why_not else hint
    if differ:
        changes = "; ".join(f"{name} was {shorten(before.get(name))}, is {shorten(now.get(name))}" for name in differ)
        raise UsageError(f"{earlier.checkpoint} is of another run: {changes}", hint=hint)


def _fixed_before(state: CheckpointState, names: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a run was not to change; of those of `names` that it did not know, what they were."""
    before = dict(state["fixed"])
    for one in options_of(TrainConfig).values():  # which it was before there was such an option
        if one.flag in names:
            before.setdefault(one.flag, EARLIER.get(one.flag, one.default))
    return before


def _why_it_ends_there(earlier: Earlier, config: TrainConfig, num_steps: int) -> str:
    """Why a run cannot end after `num_steps` in place of those it was to have; "" where it can."""
    done = earlier.state["step"]
    if num_steps < done:
        return f"it has done {done:,} steps already"
    if any(_rate(config, step, earlier.num_steps) != _rate(config, step, num_steps) for step in range(done)):
        return "learning rates of the steps that are done go by how many there are"
    return ""


def _rate(config: TrainConfig, step: int, num_steps: int) -> float:
    return learning_rate_factor(config.lr_schedule, step, num_steps, warmup=config.warmup, lowest=config.min_lr)
