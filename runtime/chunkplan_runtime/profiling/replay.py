"""A step as it was measured, beside what the simulator makes of it: from the measured times, and from the plan's.

Imports the planner's compiled simulator: import it where it is needed, not at the start of a run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from chunkplan.arrays import offsets_of
from chunkplan.cost.durations import ChunkTimes
from chunkplan.operations import OPS
from chunkplan.planfile.chunks import Chunks, chunks_of_rows
from chunkplan.planfile.plan import Plan, PlanStep
from chunkplan.schedule.actions import FORWARD, RECOMPUTE, Actions
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.simulated import Simulation
from chunkplan.schedule.trace import write_trace
from chunkplan.simulation import simulate_plan
from chunkplan_runtime.feed.joined import is_shared, join_chunks, pieces_of, schedule_chunks
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.profiling.timeline import StepTimeline

#: A process that takes so many times as long for its planned work as the others do is named.
_SLOW = 1.25


class _Measured(Simulation):
    """Actions that wait for more than the simulator knows of: no chain of them explains the whole time."""

    @cached_property
    def critical_actions(self) -> list[int]:
        """No actions: an empty list."""
        return []


@dataclass(frozen=True)
class Replay:
    """The step of one pipeline, three times with the same actions.

    `measured`: as it was. `replayed`: with the measured times of actions, and nothing lost between stages. `planned`:
    with times of the plan's cost model.
    """

    pipeline: int
    measured: Simulation
    replayed: Simulation
    planned: Simulation


def replay_step(plan: Plan, times_by_rank: Sequence[StepTimeline], layout: RankLayout) -> list[Replay]:
    """Replay a step of `plan` that all processes have timed, for every pipeline that had work.

    Raises:
        DataError: the plan is damaged.
    """
    step = times_by_rank[0].step
    described = next(plan.iter_steps(step))
    replays = []
    for pipeline, own in enumerate(layout.rows(plan.config.dp)):
        planned = {rank: simulate_plan(plan, step, rank=rank) for rank in own if (rank, 0) in described.actions}
        if not planned:
            continue
        title = f"step {step}, pipeline {pipeline}"
        if len(own) > 1 and is_shared(described):
            work = _joined(plan, described, own, planned, title)
        else:
            work = _one_after_another(planned, title)
        times = [times_by_rank[layout.rank_of(stage, pipeline)] for stage in range(layout.pp)]
        replays.append(replay(work, times, title, pipeline))
    return replays


#: A simulation of all that a pipeline does, and by data-parallel rank where its chunks begin in it.
_Work = tuple[Simulation, Mapping[int, int]]


def replay(work: _Work, times_by_stage: Sequence[StepTimeline], step: str, pipeline: int) -> Replay:
    """Replay one pipeline that did `work`; `step` says in a title what that was."""
    joined, first_chunks = work
    durations = np.zeros_like(joined.times.durations)
    ends = np.empty_like(joined.ends)
    for stage, times in enumerate(times_by_stage):
        chunk_ids = [first_chunks[action.dp_rank] + action.chunk_id for action in times.actions]
        ops = [OPS.index(action.op) for action in times.actions]
        durations[ops, stage, chunk_ids] = [action.end_ns - action.start_ns for action in times.actions]
        ends[slice(*joined.actions.stages[stage : stage + 2])] = [action.end_ns for action in times.actions]
    # The first forward of a chunk that is recomputed did less than one that counts as useful.
    recomputed = durations[FORWARD] == 0
    durations[FORWARD][recomputed] = durations[RECOMPUTE][recomputed]
    replayed_times = joined.times._replace(durations=durations, link=np.zeros_like(joined.times.link))
    replayed_ends = simulate(joined.actions, replayed_times)
    replayed = replace(joined, title=f"{step}, replayed", times=replayed_times, ends=replayed_ends)
    values = {entry.name: getattr(replayed, entry.name) for entry in fields(replayed)}
    measured = _Measured(**values | {"title": f"{step}, measured", "ends": ends})
    return Replay(pipeline, measured, replayed, planned=joined)


def waiting_shares(simulation: Simulation) -> list[float]:
    """The share of the time in which each stage waits, 0..1; unlike bubbles, without what is recomputed."""
    return [1 - busy for busy in simulation.busy_per_stage]


def write_timeline(path: str | Path, replays: Sequence[Replay], *, planned: bool) -> None:
    """Write one Chrome trace of all pipelines, of each as it was measured, replayed and, where it says, `planned`.

    Raises:
        UsageError: `path` cannot be written.
    """
    write_trace(path, [each for one in replays for each in _shown(one, planned)])


def _shown(replay: Replay, planned: bool) -> list[Simulation]:
    return [replay.measured, replay.replayed, *([replay.planned] if planned else [])]


def describe_replays(replays: Sequence[Replay], layout: RankLayout, step: int, *, planned: bool) -> list[str]:
    """Lines of a table for a terminal: of the pipeline that took longest, and of a process that is slower than others.

    `step` is the one that was measured. `planned`: the plan's times are of this model and these devices; without,
    they are left out, and no process is named as slow.
    """
    if not replays:
        return []
    slowest = max(replays, key=lambda each: each.measured.makespan)
    shown = _shown(slowest, planned)
    shares = [waiting_shares(simulation) for simulation in shown]
    which = f", pipeline {slowest.pipeline}, the slowest of {layout.dp}" if layout.dp > 1 else ""
    lines = [
        f"step {step}{which}: what share of the time each stage waited,",
        f"as measured, {'' if planned else 'and '}in a simulation with the measured times of its actions",
        "and no time between stages" + (", and as the plan predicts" if planned else ""),
        "",
        "stage  process      busy    measured   simulated" + ("     planned" if planned else ""),
    ]
    for stage in range(layout.pp):
        rank = layout.rank_of(stage, slowest.pipeline)
        busy = _busy_seconds(slowest.measured, stage)
        lines.append(
            "  ".join([f"{stage:5d}  {rank:7d}  {busy:6.2f} s", *(f"{share[stage]:10.1%}" for share in shares)])
        )
    spans = "  ".join(f"{each.makespan / 1e6:8.2f} s" for each in shown)
    lines.append(f"{'done after':24}  {spans}")
    if layout.dp > 1:
        ends = [each.measured.makespan / 1e6 for each in replays]
        lines.append(f"pipelines were done after {min(ends):.2f} to {max(ends):.2f} s")
    return lines + (_describe_slow(replays, layout) if planned else [])


def _describe_slow(replays: Sequence[Replay], layout: RankLayout) -> list[str]:
    """Lines about the process that takes longest for what is planned for it, where it sticks out."""
    slowness = {
        layout.rank_of(stage, each.pipeline): _busy_seconds(each.measured, stage) / _busy_seconds(each.planned, stage)
        for each in replays
        for stage in range(layout.pp)
    }
    slowest = max(slowness, key=lambda rank: slowness[rank])
    others = [value for rank, value in slowness.items() if rank != slowest]
    if not others or slowness[slowest] < _SLOW * statistics.median(others):
        return []
    times = slowness[slowest] / statistics.median(others)
    who = layout.describe(slowest)
    return ["", f"{who} is slow: {times:.1f} times as long", "as the others for the same planned work"]


def _busy_seconds(simulation: Simulation, stage: int) -> float:
    return simulation.busy_per_stage[stage] * simulation.makespan / 1e6


def _joined(
    plan: Plan, step: PlanStep, ranks: range, planned: Mapping[int, Simulation], title: str
) -> tuple[Simulation, dict[int, int]]:
    """What a pipeline does with the chunks of several ranks where some of them are shared, see `feed.joined`."""
    chunks = join_chunks(step, ranks)
    pieces = [[(planned[rank].times, chunk.chunk_id) for rank, chunk in each] for each in pieces_of(step, ranks)]
    times = ChunkTimes(
        np.stack([np.sum([own.durations[:, :, at] for own, at in each], axis=0) for each in pieces], axis=2),
        np.array([sum(own.link[at] for own, at in each) for each in pieces]),
    )
    stages = [schedule_chunks(chunks, plan, stage) for stage in range(plan.config.pp)]
    flat = [action for stage in stages for action in stage]
    actions = Actions(
        np.array([OPS.index(action.op) for action in flat], np.int8),
        np.array([action.chunk_id for action in flat], np.int32),
        np.zeros(len(flat), np.int32),
        offsets_of([len(stage) for stage in stages]),
    )
    return _all_of(planned, title, chunks_of_rows(chunks), times, actions), {ranks[0]: 0}


def _all_of(
    planned: Mapping[int, Simulation], title: str, table: Chunks, times: ChunkTimes, actions: Actions
) -> Simulation:
    """A simulation of all that a pipeline does, as if other pipelines were there when it meets them."""
    return replace(
        next(iter(planned.values())),
        title=f"{title}, planned",
        table=table,
        times=times,
        actions=actions,
        ends=simulate(actions, times),
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
