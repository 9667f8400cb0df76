"""Compares a measured step (`planfile/measured.py`) with simulations from its measured and from the plan's times."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from chunkplan.arrays import Int64Array, offsets_of
from chunkplan.cost.durations import ChunkTimes
from chunkplan.layers import model_stage_of
from chunkplan.operations import OPS
from chunkplan.planfile.chunks import Chunks, chunks_of_rows
from chunkplan.planfile.measured import MeasuredStep, StepTimeline, ranks_of
from chunkplan.schedule.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECOMPUTE,
    Actions,
    join_actions,
)
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.timeline import PathAction, Simulation, StepRanks
from chunkplan.schedule.trace import write_trace
from chunkplan.simulation import simulate_plan

#: A process that takes so many times as long for its planned work as the others do is named.
_SLOW = 1.25


class _Measured(Simulation):
    """Actions that wait for more than the simulator knows of: no chain of them explains the whole time."""

    @cached_property
    def critical_actions(self) -> list[PathAction]:
        """No actions: an empty list."""
        return []


@dataclass(frozen=True)
class Replay:
    """The step of one pipeline, three times with the same actions.

    `measured`: as measured. `replayed`: simulated with the measured times of actions, without losses between stages.
    `planned`: simulated with times of the plan's cost model. Processes start a shared action together, so its measured
    time is that since the last of them arrived; before, the others waited.
    """

    pipeline: int
    measured: Simulation
    replayed: Simulation
    planned: Simulation


def replay_step(measured: MeasuredStep) -> list[Replay]:
    """Replay a step that all processes have timed, for every pipeline that had work.

    Raises:
        DataError: the plan is damaged.
    """
    plan, step = measured.plan, measured.times[0].step
    described = next(plan.iter_steps(step))
    works: dict[int, _Work] = {}
    for pipeline in range(measured.dp):
        own = [rank for rank in ranks_of(pipeline, measured.dp, plan.config.dp) if (rank, 0) in described.actions]
        planned = {rank: simulate_plan(plan, step, rank=rank) for rank in own}
        if planned:
            works[pipeline] = _one_after_another(planned, f"step {step}, pipeline {pipeline}")
    return replay(works, measured.times, measured.dp, f"step {step}")


#: A simulation of all that a pipeline does, and by data-parallel rank where its chunks begin in it.
_Work = tuple[Simulation, Mapping[int, int]]


def replay(works: Mapping[int, _Work], times_by_rank: Sequence[StepTimeline], dp: int, step: str) -> list[Replay]:
    """Replay the pipelines, of `dp`, that did `works` at the same time, in order; `step` is its name in titles.

    Pipelines that share chunks run one data-parallel rank each.
    """
    if not works:
        return []
    planned = _played_together({pipeline: work for pipeline, (work, _) in works.items()}, dp)
    timed = {pipeline: _timed(work, times_by_rank[pipeline::dp]) for pipeline, work in works.items()}
    measured_of, with_times = {}, {}
    for pipeline, (starts, ends) in timed.items():
        work, _ = works[pipeline]
        durations = ends - starts
        for chunk in work.chunks:
            if chunk.cp_size > 1:  # until all are there, those who are wait
                at = chunk.chunk_id
                block = range(chunk.cp_first_rank, chunk.cp_first_rank + chunk.cp_size)
                there = np.max([timed[each][0][:, :, at] for each in block], axis=0)  # [num_ops, num_model_stages]
                durations[:, :, at] = np.maximum(ends[:, :, at] - there, 0)
        # The first forward of a chunk that is recomputed did less than one that counts as useful.
        recomputed = durations[FORWARD] == 0
        durations[FORWARD][recomputed] = durations[RECOMPUTE][recomputed]
        durations[BACKWARD] += durations[BACKWARD_INPUT] + durations[BACKWARD_WEIGHT]  # of a chunk it is whole or split
        times = work.times._replace(durations=durations, link=np.zeros_like(work.times.link))
        with_times[pipeline] = replace(work, title=f"{step}, pipeline {pipeline}, replayed", times=times)
        measured_of[pipeline] = ends[work.actions.ops, work.model_stages, work.actions.chunk_ids]
    replayed = _played_together(with_times, dp)
    found = []
    for pipeline, each in replayed.items():
        values = {entry.name: getattr(each, entry.name) for entry in fields(each)}
        title = f"{step}, pipeline {pipeline}, measured"
        measured = _Measured(**values | {"title": title, "ends": measured_of[pipeline], "step": None})
        found.append(Replay(pipeline, measured, each, planned[pipeline]))
    return found


def _timed(work: _Work, times_by_stage: Sequence[StepTimeline]) -> tuple[Int64Array, Int64Array]:
    """Start and end of each op of each chunk: [num_ops, num_model_stages, num_chunks], 0 where there is none."""
    simulation, first_chunks = work
    starts, ends = np.zeros_like(simulation.times.durations), np.zeros_like(simulation.times.durations)
    for stage, times in enumerate(times_by_stage):
        chunk_ids = [first_chunks[action.dp_rank] + action.chunk_id for action in times.actions]
        ops = [OPS.index(action.op) for action in times.actions]
        model_stages = [
            model_stage_of(stage, action.virtual_stage, simulation.pp, simulation.placement) for action in times.actions
        ]
        starts[ops, model_stages, chunk_ids] = [action.start_ns for action in times.actions]
        ends[ops, model_stages, chunk_ids] = [action.end_ns for action in times.actions]
    return starts, ends


def _played_together(works: Mapping[int, Simulation], dp: int) -> dict[int, Simulation]:
    """Simulate pipelines with their own times, where shared chunks start together."""
    first = next(iter(works.values()))
    pp = first.pp
    nothing = Actions(np.empty(0, np.int8), np.empty(0, np.int32), np.empty(0, np.int32), np.zeros(pp + 1, np.int64))
    rows = [works[each].chunks if each in works else () for each in range(dp)]
    chunks = chunks_of_rows([chunk for own in rows for chunk in own])
    chunks = chunks._replace(rank_chunks=offsets_of([len(own) for own in rows]))
    actions = join_actions([works[each].actions if each in works else nothing for each in range(dp)])
    times = ChunkTimes(
        np.concatenate([work.times.durations for work in works.values()], axis=2),
        np.concatenate([work.times.link for work in works.values()]),
    )
    ends = simulate(chunks, actions, times, pp, first.placement, dp)
    step = StepRanks(chunks, times, actions, ends) if (chunks.cp_size > 1).any() else None
    bounds = actions.stages[::pp]  # where the actions of each pipeline begin
    return {
        pipeline: replace(work, ends=ends[bounds[pipeline] : bounds[pipeline + 1]], step=step, rank=pipeline)
        for pipeline, work in works.items()
    }


def waiting_shares(simulation: Simulation) -> list[float]:
    """The share of the time in which each stage waits, 0..1; unlike bubbles, without what is recomputed."""
    return [1 - busy for busy in simulation.busy_per_stage]


def write_timeline(path: str | Path, replays: Sequence[Replay], *, planned: bool, content_hash: str) -> None:
    """Write one Chrome trace of all pipelines, each as measured, as replayed and, if `planned`, as planned.

    `content_hash` is that of the plan, for the trace.

    Raises:
        UsageError: `path` cannot be written.
    """
    write_trace(path, [each for one in replays for each in _shown(one, planned)], content_hash=content_hash)


def _shown(replay: Replay, planned: bool) -> list[Simulation]:
    return [replay.measured, replay.replayed, *([replay.planned] if planned else [])]


def replays_to_dict(replays: Sequence[Replay], dp: int, *, planned: bool) -> dict[str, object]:
    """Replays of all pipelines as one JSON document; times are in microseconds.

    `slow`: the slow process and its time over that of the others; None if no process is slow.
    """
    slow = _slowest(replays, dp) if planned and replays else None
    return {
        "pipelines": [
            {
                "pipeline": each.pipeline,
                **{
                    name: {"makespan": shown.makespan, "busy_per_stage": shown.busy_per_stage}
                    for name, shown in zip(("measured", "replayed", "planned"), _shown(each, planned), strict=False)
                },
            }
            for each in replays
        ],
        "slow": slow and {"process": slow[0], "times": slow[1]},
    }


def describe_replays(replays: Sequence[Replay], dp: int, step: int, *, planned: bool) -> list[str]:
    """Lines of a table for a terminal: of the pipeline that took longest, and of a process that is slower than others.

    `step` is the one that was measured. `planned`: the plan's times are of this model and these devices; without,
    they are left out, and no process is named as slow.
    """
    if not replays:
        return []
    slowest = max(replays, key=lambda each: each.measured.makespan)
    shown = _shown(slowest, planned)
    shares = [waiting_shares(simulation) for simulation in shown]
    which = f", pipeline {slowest.pipeline}, the slowest of {dp}" if dp > 1 else ""
    lines = [
        f"step {step}{which}: what share of the time each stage waited,",
        f"as measured, {'' if planned else 'and '}in a simulation with the measured times of its actions",
        "and no time between stages" + (", and as the plan predicts" if planned else ""),
        "",
        "stage  process      busy    measured   simulated" + ("     planned" if planned else ""),
    ]
    for stage in range(slowest.measured.pp):
        rank = stage * dp + slowest.pipeline
        busy = _busy_seconds(slowest.measured, stage)
        lines.append(
            "  ".join([f"{stage:5d}  {rank:7d}  {busy:6.2f} s", *(f"{share[stage]:10.1%}" for share in shares)])
        )
    spans = "  ".join(f"{each.makespan / 1e6:8.2f} s" for each in shown)
    lines.append(f"{'done after':24}  {spans}")
    if extra := slowest.planned.extra_forward:
        lines.append(f"measured waiting includes the forwards for the loss, {extra / 1e6:.2f} s as the plan predicts")
    if dp > 1:
        ends = [each.measured.makespan / 1e6 for each in replays]
        lines.append(f"pipelines were done after {min(ends):.2f} to {max(ends):.2f} s")
    return lines + (_describe_slow(replays, dp) if planned else [])


def _slowest(replays: Sequence[Replay], dp: int) -> tuple[int, float] | None:
    """The process that is slowest against its plan, and its time over that of the others; None if none sticks out."""
    slowness = {
        stage * dp + each.pipeline: _busy_seconds(each.measured, stage) / _busy_seconds(each.planned, stage)
        for each in replays
        for stage in range(each.measured.pp)
    }
    slowest = max(slowness, key=lambda rank: slowness[rank])
    others = [value for rank, value in slowness.items() if rank != slowest]
    if not others or slowness[slowest] < _SLOW * statistics.median(others):
        return None
    return slowest, slowness[slowest] / statistics.median(others)


def _describe_slow(replays: Sequence[Replay], dp: int) -> list[str]:
    """Lines about the process that sticks out, if one does."""
    if (found := _slowest(replays, dp)) is None:
        return []
    (slowest, times), pp = found, replays[0].measured.pp
    place = f"stage {slowest // dp} of pipeline {slowest % dp}" if pp > 1 else "data parallel"
    who = f"process {slowest} of {dp * pp} ({place})"
    return ["", f"{who} is slow: {times:.1f} times as long", "as the others for the same planned work"]


def _busy_seconds(simulation: Simulation, stage: int) -> float:
    return simulation.busy_per_stage[stage] * simulation.makespan / 1e6


def _all_of(
    planned: Mapping[int, Simulation], title: str, table: Chunks, times: ChunkTimes, actions: Actions
) -> Simulation:
    """A simulation of all that a pipeline does, which ends when it is played together with the other ones."""
    return replace(
        next(iter(planned.values())),
        title=f"{title}, planned",
        table=table,
        times=times,
        actions=actions,
        ends=np.zeros(actions.ops.size, np.int64),
        proved_ticks=0,
        step=None,
        exchange=None,
    )


def _one_after_another(planned: Mapping[int, Simulation], title: str) -> tuple[Simulation, dict[int, int]]:
    """Every stage does all of one data-parallel rank, then the next; also where each rank's chunks begin."""
    first_chunks: dict[int, int] = {}
    num_chunks = num_groups = 0
    chunks, chunk_ids = [], []
    for rank, each in planned.items():
        first_chunks[rank] = num_chunks
        chunk_ids.append(each.actions.chunk_ids + np.int32(num_chunks))
        for chunk in each.chunks:
            group = None if chunk.group_id is None else chunk.group_id + num_groups
            chunks.append(replace(chunk, chunk_id=chunk.chunk_id + num_chunks, group_id=group))
        num_chunks += len(each.chunks)
        num_groups += int(each.table.group_id.max(initial=-1)) + 1
    found = list(planned.values())
    pp = found[0].pp
    parts = [
        (each, ids, slice(*each.actions.stages[stage : stage + 2]))
        for stage in range(pp)
        for each, ids in zip(found, chunk_ids, strict=True)
    ]
    actions = Actions(
        np.concatenate([each.actions.ops[own] for each, _, own in parts]),
        np.concatenate([ids[own] for _, ids, own in parts]),
        np.concatenate([each.actions.virtual_stages[own] for each, _, own in parts]),
        np.sum([each.actions.stages for each in found], axis=0),
    )
    times = ChunkTimes(
        np.concatenate([each.times.durations for each in found], axis=2),
        np.concatenate([each.times.link for each in found]),
    )
    return _all_of(planned, title, chunks_of_rows(chunks), times, actions), first_chunks
