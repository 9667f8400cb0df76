"""Ties the checkpoints of `ChunkTrainer` to the plan they were made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from chunkplan.errors import UsageError
from chunkplan.planfile.plan import Plan
from chunkplan.planfile.plan_writer import hashes_by_epoch

#: What transformers leaves in a checkpoint when everything else is there.
_STATE = "trainer_state.json"


class PlanIdentity(TrainerCallback, ExportableState):
    """Puts the plan's content hash into every checkpoint."""

    def __init__(self, plan: str) -> None:
        self.plan = plan

    def state(self) -> dict[str, Any]:
        """What transformers saves in a checkpoint, and makes this callback from when it resumes."""
        return {"args": {"plan": self.plan}, "attributes": {}}


def checkpoint_of_plan(asked: str | bool, output: str | None, plan: Plan) -> str:
    """The checkpoint to go on from: `asked`, or the last one in `output`; `plan` may have more epochs than its own.

    Raises:
        UsageError: there is none, or it is of another plan.
    """
    find: Any = get_last_checkpoint
    folder = Path(output or "")
    found = str(asked) if asked is not True else find(str(folder)) if folder.is_dir() else None
    if found is None or not (Path(found) / _STATE).is_file():
        raise UsageError(
            f"there is no checkpoint in {found or folder}",
            hint="leave resume_from_checkpoint out to start from the beginning",
        )
    states: dict[str, Any] = TrainerState.load_from_json(str(Path(found) / _STATE)).stateful_callbacks or {}
    state = states.get(PlanIdentity.__name__)
    before = None if state is None else state["args"]["plan"]
    if before != plan.content_hash and before not in hashes_by_epoch(plan):
        of = "no plan" if before is None else f"plan {before[:12]}"
        raise UsageError(
            f"a checkpoint of {of}, this one is {plan.content_hash[:12]}",
            where=found,
            hint="go on with the plan it was begun with, or start anew from its weights",
        )
    return found
