"""Ties the checkpoints of `ChunkTrainer` to the plan they were made with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim import SGD
from transformers import TrainerCallback, TrainingArguments, get_scheduler
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from chunkplan.errors import UsageError
from chunkplan.planfile.likeness import changed_samples, samples_of
from chunkplan.planfile.plan import Plan

#: What transformers leaves in a checkpoint when everything else is there.
_STATE = "trainer_state.json"

#: What a run is given so that learning rates do not go by its number of steps.
_ANY_LENGTH = 'lr_scheduler_type="constant"'


class PlanIdentity(TrainerCallback, ExportableState):
    """Puts into every checkpoint which samples the plan's steps have: `samples_of`."""

    def __init__(self, samples: Mapping[str, Any]) -> None:
        self.samples = samples

    def state(self) -> dict[str, Any]:
        """What transformers saves in a checkpoint, and makes this callback from when it resumes."""
        return {"args": {"samples": self.samples}, "attributes": {}}


def checkpoint_of_plan(asked: str | bool, args: TrainingArguments, plan: Plan, *, has_own_rates: bool) -> str:
    """The checkpoint to go on from: `asked`, or the last one of `args`; `plan` is its own or one like it.

    `has_own_rates`: learning rates are those of a scheduler that was given, not of `args`.

    Raises:
        UsageError: there is none, or it is of other samples, or its steps would have had other learning rates.
    """
    find: Any = get_last_checkpoint
    folder = Path(args.output_dir or "")
    found = str(asked) if asked is not True else find(str(folder)) if folder.is_dir() else None
    if found is None or not (Path(found) / _STATE).is_file():
        raise UsageError(
            f"there is no checkpoint in {found or folder}",
            hint="leave resume_from_checkpoint out to start from the beginning",
        )
    state = TrainerState.load_from_json(str(Path(found) / _STATE))
    identity: Any = (state.stateful_callbacks or {}).get(PlanIdentity.__name__)
    before = None if identity is None else identity["args"].get("samples")
    if changes := changed_samples(before, samples_of(plan.manifest)):
        raise UsageError(
            f"a checkpoint of another plan: {changes}",
            where=found,
            hint="go on with the plan it was begun with, or start anew from its weights",
        )
    now = args.max_steps if args.max_steps > 0 else plan.manifest["totals"]["num_steps"]
    if not has_own_rates and _rates(args, state.global_step, state.max_steps) != _rates(args, state.global_step, now):
        raise UsageError(
            f"a checkpoint of a run of {state.max_steps:,} steps, this one has {now:,}: learning rates of the steps "
            "that are done go by how many there are",
            where=found,
            hint=f"go on with max_steps={state.max_steps}, or start anew; {_ANY_LENGTH} lets a run become longer",
        )
    return found


def _rates(args: TrainingArguments, steps: int, num_steps: int) -> list[float]:
    """Factors of the learning rate in the first `steps` of `num_steps`, and in the next; none where losses decide.

    The optimizer in a checkpoint has the rate of the next step already.
    """
    optimizer = SGD([torch.zeros(1)], lr=args.learning_rate)
    warmup, more = args.get_warmup_steps(num_steps), cast("dict[str, Any] | None", args.lr_scheduler_kwargs)
    schedule: Any = get_scheduler(args.lr_scheduler_type, optimizer, warmup, num_steps, more)
    return [factor(step) for factor in getattr(schedule, "lr_lambdas", ()) for step in range(steps + 1)]
