"""The largest step of a run on several processes, whose times are written at its end."""

from __future__ import annotations

from pathlib import Path

from chunkplan.planfile.measured import StepTimeline, write_measured
from chunkplan.planfile.plan import Plan, PlanStep
from chunkplan_runtime.distributed.job import Job

#: Actions of a process: nobody could look at more.
_MOST_ACTIONS = 20_000


class LargestStep:
    """Keeps this process's times of the largest step so far. All processes keep the same step.

    The first one is kept only while there is no other: in it everything is slow.
    """

    def __init__(self) -> None:
        self._num_tokens = -1
        self._times: StepTimeline | None = None

    def look_at(self, step: PlanStep, times: StepTimeline) -> None:
        """Keep the times of a step that is done, if it is the largest so far."""
        most_actions = max(map(len, step.actions.values()), default=0)
        if step.num_tokens > self._num_tokens and most_actions <= _MOST_ACTIONS:
            self._num_tokens = step.num_tokens if self._times is not None else 0
            self._times = times

    def write(self, plan: Plan, path: Path, job: Job, *, planned: bool) -> bool:
        """Write what all processes measured of it (`planfile/measured.py`), if there was such a step; whether.

        `planned` says whether the plan's times are of this model and these devices, so that they stand beside it.

        Raises:
            UsageError: the file cannot be written.
        """
        timelines = [times for times in job.all_gather_object(self._times) if times is not None]
        if timelines and job.is_main:
            write_measured(path, plan, timelines, job.layout.dp, planned=planned)
        return bool(timelines)
