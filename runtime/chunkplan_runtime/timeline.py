"""When each action of a step began and ended on this process, and what follows for all of them: work and waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter_ns
from typing import Any

import torch

from chunkplan.planfile.measured import Spent, StepTimeline, TimedAction
from chunkplan.planfile.plan import Action
from chunkplan_runtime.devices import synchronize
from chunkplan_runtime.execution.executor import Around
from chunkplan_runtime.layout import RankLayout

#: A moment: nanoseconds, or on a GPU an event in its stream, which torch has no types for.
_Mark = Any


class ActionClock:
    """Times what one process does in a step, anew for every step.

    On a GPU moments are those at which the device gets there, and nobody waits for it before `stop`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._actions: list[tuple[int, Action, _Mark, _Mark]] = []

    def start(self, step: int) -> None:
        """Begin a step at time 0; for times that can be compared, on all processes at the same moment."""
        self._step, self._actions = step, []
        self._reductions: list[tuple[_Mark, _Mark]] = []
        synchronize(self._device)
        self._zero = self._mark()

    def around(self, dp_rank: int) -> Around:
        """What `RankExecutor.run` enters around each action of a rank's work, to time it."""

        @contextmanager
        def timed(action: Action) -> Iterator[None]:
            start = self._mark()
            yield
            self._actions.append((dp_rank, action, start, self._mark()))

        return timed

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Time the block, which reduces gradients."""
        start = self._mark()
        yield
        self._reductions.append((start, self._mark()))

    def stop(self) -> StepTimeline:
        """Wait for the device, and give what was timed since `start`."""
        synchronize(self._device)

        def since_start(mark: _Mark) -> int:
            return int(mark - self._zero if isinstance(mark, int) else round(self._zero.elapsed_time(mark) * 1e6))

        actions = [
            TimedAction(dp_rank, each.op, each.chunk_id, since_start(start), since_start(end), each.virtual_stage)
            for dp_rank, each, start, end in self._actions
        ]
        reduced = sum(since_start(end) - since_start(start) for start, end in self._reductions)
        return StepTimeline(self._step, actions, reduced)

    def on_device(self) -> str | None:
        """Which action the GPU is at, of those that it was given whole; None on a CPU."""
        if self._device.type != "cuda":
            return None
        for dp_rank, action, start, end in list(self._actions):
            if not end.query():
                at = "in" if start.query() else "before"
                return f"its GPU is {at} the {action.op} of chunk {action.chunk_id} of rank {dp_rank}"
        return "its GPU has done all actions that it was given"

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return perf_counter_ns()
        event: _Mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def stage_rows(spent: Sequence[Spent], layout: RankLayout) -> list[dict[str, float]]:
    """What each process did and waited for in a step, in their order, each a row of JSON; times in seconds.

    What is not busy of a stage until the last one of its pipeline is done is waiting, `bubble` its share, 0..1. It is
    idle from then on until the last pipeline is done, when gradients can be reduced.
    """
    last = max(own.end for own in spent)
    rows: list[dict[str, float]] = []
    for process, own in enumerate(spent):
        at = replace(layout, process=process)
        span = max(spent[layout.process_of(stage, at.replica)].end for stage in range(layout.pp))
        rows.append(
            {
                "process": process,
                "stage": at.stage,
                "pipeline": at.replica,
                "busy_seconds": own.busy,
                "wait_seconds": span - own.busy,
                "bubble": (span - own.busy) / span if span else 0.0,
                "idle_seconds": last - span,
                "reduce_seconds": max(own.reduce - (last - own.end), 0.0),
            }
        )
    return rows
