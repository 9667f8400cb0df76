"""Whether a run may go on from a checkpoint: with the same samples, model and way of learning, as far as it was to go.

Its plan may be another one whose steps have the same samples (`samples_of`), for other ranks or of more epochs. It may
end after another number of steps where those that are done had the same learning rates, so that it is then the run that
it would have been from the start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim import SGD
from transformers import TrainerCallback, TrainingArguments, get_scheduler
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from chunkplan.errors import UsageError
from chunkplan.planfile.likeness import EPOCHS, samples_of
from chunkplan.planfile.plan import Plan
from chunkplan.quantities import counted
from chunkplan_runtime.distributed.job import Job, shorten
from chunkplan_runtime.training.checkpoint import CheckpointState, read_state
from chunkplan_runtime.training.config import TrainConfig, learning_rate_factor
from chunkplan_runtime.training.run_folder import RunFolder
from chunkplan_runtime.training.setup import TrainingData

#: The options that say no more than after how many steps a run ends, by flag.
_ENDS = {"--max-steps": "max_steps", "--max-epochs": "max_epochs"}

_RATES = "learning rates of the steps that are done go by how many there are"

#: What transformers leaves in a checkpoint when everything else is there.
_TRAINER_STATE = "trainer_state.json"

#: What a run is given so that learning rates do not go by its number of steps.
_ANY_LENGTH = 'lr_scheduler_type="constant"'


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """What is not as it was before, by name, in words; a plan of more epochs is none, as its first steps are the same.

    How many steps there are is judged by `why_not_as_long`.
    """
    found = _differences(before, now)
    if before.get(EPOCHS, 0) < now.get(EPOCHS, 0):
        found.pop(EPOCHS, None)
    return found


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    differ = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    return {name: f"{name} was {shorten(before.get(name))}, is {shorten(now.get(name))}" for name in differ}


def why_not_as_long(done: int, before: int, now: int, rates: Callable[[int], list[float]]) -> str:
    """Why a run of `done` steps that was to have `before` cannot have as many as `now`; "" where it can.

    `rates`: learning rates of the steps that are done, by how many there are in all.
    """
    if now < done:
        return f"it has done {done:,} steps already"
    return _RATES if rates(before) != rates(now) else ""


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
    fixed = state["fixed"]
    ends: dict[str, Any] = {field: fixed.get(flag) for flag, field in _ENDS.items()}
    if epochs := fixed.get(EPOCHS):
        ends["max_epochs"] = min(ends["max_epochs"] or epochs, epochs)
    num_steps = data.num_steps(replace(config, **ends))
    samples = samples_of(data.plan.manifest)
    is_like = not changes({name: fixed.get(name) for name in samples}, samples)
    if is_finished and is_like and data.num_steps(config) <= num_steps:
        raise _no_more(folder, config, data, num_steps)
    return Earlier(checkpoint, state, num_steps)


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
    before, now = earlier.state["fixed"], json.loads(json.dumps(fixed))
    done = earlier.state["step"]

    def rates(steps: int) -> list[float]:
        how = {"warmup": config.warmup, "lowest": config.min_lr}
        return [learning_rate_factor(config.lr_schedule, step, steps, **how) for step in range(done)]

    why_not = why_not_as_long(done, earlier.num_steps, num_steps, rates)
    differ = _differences(before, now) if why_not else changes(before, now)
    if not why_not:
        differ = {name: text for name, text in differ.items() if name not in _ENDS}
    if differ:
        hint = "resume with what it was started with, or start anew in another --output"
        told = f"{earlier.checkpoint} is of another run: {'; '.join(differ.values())}"
        raise UsageError(told, hint=f"{why_not}: {hint}" if why_not else hint)


class PlanIdentity(TrainerCallback, ExportableState):
    """Puts into every checkpoint of a `ChunkTrainer` which samples the plan's steps have: `samples_of`."""

    def __init__(self, samples: Mapping[str, Any]) -> None:
        self.samples = samples

    def state(self) -> dict[str, Any]:
        """What transformers saves in a checkpoint, and makes this callback from when it resumes."""
        return {"args": {"samples": self.samples}, "attributes": {}}


def checkpoint_of_plan(asked: str | bool, args: TrainingArguments, plan: Plan, *, has_own_rates: bool) -> str:
    """The checkpoint that a `ChunkTrainer` goes on from: `asked`, or the last one of `args`.

    `has_own_rates`: learning rates are those of a scheduler that was given, not of `args`.

    Raises:
        UsageError: there is none, or it is of other samples, or its steps would have had other learning rates.
    """
    find: Any = get_last_checkpoint
    folder = Path(args.output_dir or "")
    found = str(asked) if asked is not True else find(str(folder)) if folder.is_dir() else None
    if found is None or not (Path(found) / _TRAINER_STATE).is_file():
        raise UsageError(
            f"there is no checkpoint in {found or folder}",
            hint="leave resume_from_checkpoint out to start from the beginning",
        )
    state = TrainerState.load_from_json(str(Path(found) / _TRAINER_STATE))
    identity: Any = (state.stateful_callbacks or {}).get(PlanIdentity.__name__)
    before = None if identity is None else identity["args"].get("samples")
    told = "it does not say which samples its steps have"
    if isinstance(before, Mapping):
        told = "; ".join(changes(before, samples_of(plan.manifest)).values())
    if told:
        raise UsageError(
            f"a checkpoint of another plan: {told}",
            where=found,
            hint="go on with the plan it was begun with, or start anew from its weights",
        )

    def rates(num_steps: int) -> list[float]:
        """Of the steps that are done and the next, which the optimizer has already; none where losses decide."""
        if has_own_rates:
            return []
        optimizer = SGD([torch.zeros(1)], lr=args.learning_rate)
        warmup, more = args.get_warmup_steps(num_steps), cast("dict[str, Any] | None", args.lr_scheduler_kwargs)
        schedule: Any = get_scheduler(args.lr_scheduler_type, optimizer, warmup, num_steps, more)
        steps = range(state.global_step + 1)
        return [factor(step) for factor in getattr(schedule, "lr_lambdas", ()) for step in steps]

    now = args.max_steps if args.max_steps > 0 else plan.manifest["totals"]["num_steps"]
    if why_not := why_not_as_long(state.global_step, state.max_steps, now, rates):
        raise UsageError(
            f"a checkpoint of a run of {state.max_steps:,} steps, this one has {now:,}: {why_not}",
            where=found,
            hint=f"go on with max_steps={state.max_steps}, or start anew; {_ANY_LENGTH} lets a run become longer",
        )
    return found
