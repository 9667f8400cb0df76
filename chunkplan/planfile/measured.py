"""measured.json of a run on several processes: when each of them did each action of the run's largest step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from chunkplan.domains import FLAG, PATH, TEXT, Expected, find_mismatch, whole
from chunkplan.errors import DataError, UsageError
from chunkplan.files.json_file import read_json
from chunkplan.files.writing import whole_file
from chunkplan.planfile.load import load_plan
from chunkplan.planfile.plan import Plan, find_step


class TimedAction(NamedTuple):
    """An action of a data-parallel rank's row of the plan, in nanoseconds since the step began."""

    dp_rank: int
    op: str
    chunk_id: int
    start_ns: int
    end_ns: int
    virtual_stage: int = 0


class Spent(NamedTuple):
    """Seconds of a process in a step: in which actions ran, until the last one ended, and in the reduction after it."""

    busy: float
    end: float
    reduce: float


@dataclass(frozen=True)
class StepTimeline:
    """One process's actions of a step, in order, and how long the reduction of its gradients took after them."""

    step: int
    actions: list[TimedAction]
    reduce_ns: int

    @property
    def spent(self) -> Spent:
        """Seconds in which actions ran, until the last one ended, and of the reduction."""
        busy = sum(action.end_ns - action.start_ns for action in self.actions)
        end = max((action.end_ns for action in self.actions), default=0)
        return Spent(busy / 1e9, end / 1e9, self.reduce_ns / 1e9)


class MeasuredStep(NamedTuple):
    """A step of `plan` as `dp` pipelines of processes did it, by process; whether the plan's times are of these."""

    plan: Plan
    times: list[StepTimeline]
    dp: int
    planned: bool


_ACTION: Expected = {
    "dp_rank": whole(),
    "op": TEXT,
    "chunk_id": whole(),
    "start_ns": whole(),
    "end_ns": whole(),
    "virtual_stage": whole(),
}
_PLACE = replace(PATH, holds=lambda value: PATH.holds(value) and Path(value).is_absolute(), expected="an absolute path")
_FILE: Expected = {
    "plan": _PLACE,
    "content_hash": TEXT,
    "step": whole(),
    "dp": whole(1),
    "planned": FLAG,
    "processes": [{"reduce_ns": whole(), "actions": [_ACTION]}],
}
_HINT = "the file is damaged or not of this plan: train again, or leave it out"


def write_measured(path: Path, plan: Plan, times: Sequence[StepTimeline], dp: int, *, planned: bool) -> None:
    """Write what all processes have timed of a step of `plan`.

    Raises:
        UsageError: `path` cannot be written.
    """
    processes = [
        {"reduce_ns": each.reduce_ns, "actions": [action._asdict() for action in each.actions]} for each in times
    ]
    document = {"plan": str(plan.path.absolute()), "content_hash": plan.content_hash, "step": times[0].step}
    with whole_file(path) as file:
        json.dump({**document, "dp": dp, "planned": planned, "processes": processes}, file)


def read_measured(path: Path) -> MeasuredStep:
    """Read such a file, and open its plan.

    Raises:
        UsageError: there is none, or the plan is not where it was.
        DataError: it is damaged, or not what its plan is.
    """
    try:
        document = read_json(path, hint=_HINT)
    except FileNotFoundError as error:
        raise UsageError(
            f"a run without measured times: {path} is not there",
            hint="a run on several processes leaves it in its folder",
        ) from error
    if found := find_mismatch(document, _FILE):
        raise DataError(found, where=str(path), hint=_HINT)
    try:
        plan = load_plan(document["plan"])
    except UsageError as error:
        hint = "a run is shown beside its plan: put it back there, or train again"
        raise UsageError(error.message, where=str(path), hint=hint) from error
    config, dp, step, times = plan.config, document["dp"], document["step"], []
    if plan.content_hash != document["content_hash"] or len(document["processes"]) != dp * config.pp or config.dp % dp:
        raise DataError(f"not of the plan in {plan.path}", where=str(path), hint=_HINT)
    described = find_step(plan, step)
    for number, process in enumerate(document["processes"]):
        stage, pipeline = divmod(number, dp)
        actions = [TimedAction(**action) for action in process["actions"]]
        planned = [
            (rank, action.op, action.chunk_id, action.virtual_stage)
            for rank in ranks_of(pipeline, dp, config.dp)
            for action in described.actions.get((rank, stage), ())
        ]
        done = [(each.dp_rank, each.op, each.chunk_id, each.virtual_stage) for each in actions]
        if done != planned or any(each.end_ns < each.start_ns for each in actions):
            raise DataError(f"process {number} does not do what step {step} has for it", where=str(path), hint=_HINT)
        times.append(StepTimeline(step, actions, process["reduce_ns"]))
    return MeasuredStep(plan, times, dp, document["planned"])


def ranks_of(pipeline: int, dp: int, plan_dp: int) -> range:
    """The data-parallel ranks of a plan for `plan_dp` of them that one of `dp` pipelines runs, one after another."""
    share = plan_dp // dp
    return range(pipeline * share, (pipeline + 1) * share)
