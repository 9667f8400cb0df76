"""The largest step of a run on several processes, looked back on at its end: who was busy, who waited, and why."""

from __future__ import annotations

from pathlib import Path

from chunkplan.planfile.plan import Plan, PlanStep
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.profiling.timeline import StepTimeline

#: Actions of a process: a trace of more takes minutes to write, and nobody could look at it.
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

    def report(self, plan: Plan, trace: Path, job: Job, *, planned: bool) -> list[str]:
        """Write a Chrome trace of it; returns lines to print, none where there was no such step.

        Training does without numba, which the planner's simulator needs; where it is missing there is no trace.

        `planned` says whether the plan's times are of this model and these devices, so that they stand beside it.

        Raises:
            UsageError: the trace cannot be written.
        """
        timelines = [times for times in job.all_gather_object(self._times) if times is not None]
        if not timelines or not job.is_main:
            return []
        try:
            from chunkplan_runtime.profiling.replay import describe_replays, replay_step, write_timeline
        except ModuleNotFoundError as error:
            return [f"timeline  none: {error}"]
        replays = replay_step(plan, timelines, job.layout)
        write_timeline(trace, replays, planned=planned, content_hash=plan.content_hash)
        lines = describe_replays(replays, job.layout, timelines[0].step, planned=planned)
        return [*lines, f"timeline  {trace}"]
