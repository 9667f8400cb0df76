"""What processes did when, what they waited for, and how that compares with a replay in the simulator."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from time import perf_counter_ns

import numpy as np
import pytest
import torch
import torch.distributed as dist

from chunkplan import PlanConfig, build, load_plan, simulate_plan
from chunkplan.errors import DataError, UsageError
from chunkplan.operations import BACKWARDS, OPS
from chunkplan.planfile.measured import MeasuredStep, StepTimeline, TimedAction, read_measured, write_measured
from chunkplan.planfile.plan import Action
from chunkplan.reporting.replay import replay_step, waiting_shares, write_timeline
from chunkplan_runtime.distributed.job import make_groups
from chunkplan_runtime.distributed.stages import cut_stage, split_layers
from chunkplan_runtime.execution.executor import ActionClock, RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.layout import RankLayout, choose_layout, one_pipeline
from chunkplan_runtime.models.model import new_model, read_config
from chunkplan_runtime.training.metrics import stage_rows
from tests.support.analyses import write_analysis
from tests.support.shared_plans import build_blocks

LENGTHS = [23, 5, 9, 3, 30, 1, 8, 41, 2, 12]


@pytest.fixture(scope="module")
def analysis(tmp_path_factory, random_sequences):
    return write_analysis(tmp_path_factory.mktemp("timeline"), random_sequences(LENGTHS, seed=3))


@pytest.fixture(scope="module")
def plan(analysis, tmp_path_factory):
    return build_plan(analysis, tmp_path_factory.mktemp("plan") / "plan", dp=2, pp=4)


def build_plan(analysis, folder, **changes):
    settings = {"chunk_size": 8, "k": 2, "global_batch": len(LENGTHS), "cp": "off", **changes}
    build(analysis, folder, PlanConfig(**settings))
    return load_plan(folder)


def planned_times(plan, layout, slow_rank=-1):
    """Every action takes as long as planned, twice as long on `slow_rank`, and messages no time."""
    times = []
    step = next(plan.iter_steps())
    for pipeline in range(layout.dp):
        work = []
        for dp_rank in replace(layout, process=pipeline).dp_ranks(plan.config.dp):
            durations = simulate_plan(plan, rank=dp_rank).times.durations
            for stage in range(layout.pp):
                slowness = 1 + (layout.process_of(stage, pipeline) == slow_rank)
                for action in step.actions[dp_rank, stage]:
                    op = OPS.index(action.op)
                    ns = slowness * int(durations[op, stage, action.chunk_id])
                    work.append((stage, dp_rank, action.op, action.chunk_id, ns))
        times.append(played_through(work, layout.pp))
    return [times[rank % layout.dp][rank // layout.dp] for rank in range(layout.world_size)]


def replayed(plan, times, layout):
    return replay_step(MeasuredStep(plan, times, layout.dp, planned=True))


def played_through(work, pp):
    """The rules of a pipeline in a few lines: (stage, dp_rank, op, chunk_id, ns), in order of each stage."""
    queues = [[each for each in work if each[0] == stage] for stage in range(pp)]
    done = {}
    clock, actions = [0] * pp, [list[TimedAction]() for _ in range(pp)]
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                _, dp_rank, op, chunk_id, ns = queue[0]
                backward, neighbour = op in BACKWARDS, stage + (1 if op in BACKWARDS else -1)
                is_alone = op in ("recompute", "backward_weight")
                needs = not is_alone and 0 <= neighbour < pp
                if needs and (neighbour, dp_rank, backward, chunk_id) not in done:
                    break
                ready = done[neighbour, dp_rank, backward, chunk_id] if needs else 0
                start = max(clock[stage], ready)
                clock[stage] = start + ns
                if not is_alone:
                    done[stage, dp_rank, backward, chunk_id] = clock[stage]
                actions[stage].append(TimedAction(dp_rank, op, chunk_id, start, clock[stage]))
                queue.pop(0)
    return [StepTimeline(0, each, 0) for each in actions]


def test_a_clock_times_what_lies_between_start_and_stop():
    clock = ActionClock(torch.device("cpu"))
    for step in (3, 4):
        before = perf_counter_ns()
        clock.start(step)
        for chunk_id, op in enumerate(("forward", "backward")):
            with clock.around(5)(Action(op, chunk_id, 0)):
                pass
        with clock.reducing():
            pass
        times = clock.stop()
        assert times.step == step
        assert [each[:3] for each in times.actions] == [(5, "forward", 0), (5, "backward", 1)]
        moments = [moment for each in times.actions for moment in each[3:5]]
        assert moments == sorted(moments) and moments[0] >= 0
        assert 0 <= times.reduce_ns <= perf_counter_ns() - before - moments[-1]


def test_what_is_not_busy_until_the_last_stage_of_a_pipeline_is_done_is_waiting():
    def times(*spans, reduce_ns=0):
        return StepTimeline(7, [TimedAction(0, "forward", 0, start, end) for start, end in spans], reduce_ns)

    second = 10**9
    by_rank = [
        times((0, 1 * second), (3 * second, 4 * second), reduce_ns=second // 2),
        times(),
        times((1 * second, 3 * second)),
        times(),
    ]
    rows = stage_rows([times.spent for times in by_rank], RankLayout(dp=2, pp=2))
    places = [(row["process"], row["stage"], row["pipeline"]) for row in rows]
    assert places == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert [row["busy_seconds"] for row in rows] == [2.0, 0.0, 2.0, 0.0]
    assert [row["wait_seconds"] for row in rows] == [2.0, 0.0, 2.0, 0.0]
    assert [row["bubble"] for row in rows] == [0.5, 0.0, 0.5, 0.0]
    assert [row["reduce_seconds"] for row in rows] == [0.5, 0.0, 0.0, 0.0]
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize(("dp", "schedule"), [(1, "1f1b"), (2, "1f1b"), (1, "zero-bubble")])
def test_a_step_that_lost_nothing_between_stages_is_replayed_as_it_was(analysis, tmp_path, dp, schedule):
    plan = build_plan(analysis, tmp_path / "plan", dp=2, pp=4, schedule=schedule)
    layout = RankLayout(dp=dp, pp=4)
    times = planned_times(plan, layout)
    replays = replayed(plan, times, layout)
    assert [each.pipeline for each in replays] == list(range(dp))
    for each in replays:
        assert np.array_equal(each.measured.ends, each.replayed.ends)
        assert np.array_equal(each.measured.starts, each.replayed.starts)
        assert waiting_shares(each.measured) == waiting_shares(each.replayed)
        assert each.replayed.makespan <= each.planned.makespan  # which has links
        assert each.replayed.bubble <= each.planned.bubble
    for row in stage_rows([each.spent for each in times], layout):
        assert row["bubble"] == pytest.approx(waiting_shares(replays[row["pipeline"]].measured)[row["stage"]])


def test_the_plan_of_one_rank_is_what_the_simulator_says_of_it(plan):
    for each in replayed(plan, planned_times(plan, RankLayout(dp=2, pp=4)), RankLayout(dp=2, pp=4)):
        assert np.array_equal(each.planned.ends, simulate_plan(plan, rank=each.pipeline).ends)


def test_chunks_of_ranks_that_share_a_pipeline_are_told_apart(plan):
    [found] = replayed(plan, planned_times(plan, RankLayout(dp=1, pp=4)), RankLayout(dp=1, pp=4))
    alone = [simulate_plan(plan, rank=rank) for rank in range(2)]
    assert [chunk.chunk_id for chunk in found.planned.chunks] == list(range(sum(len(each.chunks) for each in alone)))
    groups = [{chunk.group_id for chunk in each.chunks} - {None} for each in (*alone, found.planned)]
    assert len(groups[2]) == len(groups[0]) + len(groups[1])
    assert found.planned.peak_retained_tokens >= alone[0].peak_retained_tokens


def test_who_waits_for_a_slower_process_in_a_shared_chunk_is_not_busy(tmp_path):
    """The second process takes twice as long as planned: the first waits where they meet, measured and replayed."""
    plan, layout = build_blocks(tmp_path, {300: (0, 2)}, dp=2), RankLayout(dp=2)
    planned = [simulate_plan(plan, rank=rank) for rank in range(2)]
    queues = [
        list(
            zip(
                each.actions.ops.tolist(),
                each.actions.chunk_ids.tolist(),
                (each.ends - each.starts).tolist(),
                strict=True,
            )
        )
        for each in planned
    ]
    num_met = sum(planned[0].chunks[chunk_id].cp_size > 1 for _, chunk_id, _ in queues[0])
    assert [each[:2] for each in queues[0][:num_met]] == [each[:2] for each in queues[1][:num_met]]
    clock, waited, timed = [0, 0], 0, [list[TimedAction](), list[TimedAction]()]
    for number in range(max(map(len, queues))):
        met = max(clock)
        for rank, queue in enumerate(queues):
            if number < len(queue):
                op, chunk_id, ns = queue[number]
                start = clock[rank]
                waited += met - start if number < num_met else 0
                clock[rank] = (met if number < num_met else start) + (rank + 1) * ns
                timed[rank].append(TimedAction(rank, OPS[op], chunk_id, start, clock[rank]))
    found = replayed(plan, [StepTimeline(0, each, 0) for each in timed], layout)
    for rank, each in enumerate(found):
        busy = (rank + 1) * sum(ns for _, _, ns in queues[rank])
        for shown in (each.measured, each.replayed):
            assert int(shown.ends[-1]) == clock[rank]
            assert int((shown.ends - shown.starts).sum()) == busy
    assert waited > 0
    assert [each.replayed.waiting_for_ranks_per_stage for each in found] == [[waited / 1000], [0]]


def test_pipelines_that_share_sequences_are_replayed_as_they_were(tmp_path):
    """All but one process come late to their first chunk."""
    plan, layout = build_blocks(tmp_path, {300: (0, 2), 50: (0, 2)}, dp=2, pp=2), RankLayout(dp=2, pp=2)
    # The plan's own times are replayed whatever was measured.
    nothing = [StepTimeline(0, [], 0)] * layout.world_size
    planned = [each.planned for each in replayed(plan, nothing, layout)]
    assert all(np.array_equal(each.ends, simulate_plan(plan, rank=each.rank).ends) for each in planned)
    times, late = [], 777
    for rank in range(layout.world_size):
        stage, each = rank // layout.dp, planned[rank % layout.dp]
        own = slice(*each.actions.stages[stage : stage + 2])
        starts = (each.starts - each.waits)[own] + late
        starts[0] -= late if rank == 0 else 0
        columns = (each.actions.ops[own], each.actions.chunk_ids[own], starts, each.ends[own] + late)
        actions = [
            TimedAction(each.rank, OPS[op], *rest)
            for op, *rest in zip(*(column.tolist() for column in columns), strict=True)
        ]
        times.append(StepTimeline(0, actions, 0))
    for each, wanted in zip(replayed(plan, times, layout), planned, strict=True):
        assert np.array_equal(each.measured.ends, wanted.ends + late)
        assert np.array_equal(each.measured.starts, wanted.starts + late)
        assert each.replayed.makespan <= wanted.makespan  # which has links
        assert np.array_equal(each.replayed.ends - each.replayed.starts, wanted.ends - wanted.starts)


def test_actions_of_virtual_stages_are_replayed_each_with_its_own_times(analysis, tmp_path):
    plan = build_plan(analysis, tmp_path / "plan", pp=2, schedule="interleaved", virtual_stages=2)
    planned, times = simulate_plan(plan), []
    for start, stop in pairwise(planned.actions.stages):
        own = slice(start, stop)
        columns = (planned.actions.ops[own], planned.actions.chunk_ids[own], planned.starts[own], planned.ends[own])
        rows = zip(*(column.tolist() for column in (*columns, planned.actions.virtual_stages[own])), strict=True)
        times.append(StepTimeline(0, [TimedAction(0, OPS[op], *rest) for op, *rest in rows], 0))
    [found] = replayed(plan, times, one_pipeline(plan))
    assert np.array_equal(found.measured.ends, planned.ends)
    assert np.array_equal(found.measured.starts, planned.starts)
    assert np.array_equal(found.replayed.ends - found.replayed.starts, planned.ends - planned.starts)


def test_the_trace_has_all_three_side_by_side(plan, tmp_path):
    def later(action):
        return action._replace(start_ns=action.start_ns + 999, end_ns=action.end_ns + 999)

    late = [
        replace(times, actions=[later(each) for each in times.actions])
        for times in planned_times(plan, RankLayout(dp=1, pp=4))
    ]
    replays = replayed(plan, late, RankLayout(dp=1, pp=4))
    write_timeline(tmp_path / "timeline.json", replays, planned=True, content_hash=plan.content_hash)
    document = json.loads((tmp_path / "timeline.json").read_text())
    assert document["otherData"] == {"plan": plan.content_hash}
    events = document["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {
        process: f"step 0, pipeline 0, {what}: auto" for process, what in enumerate(("measured", "replayed", "planned"))
    }
    done = [[(each["name"], each["tid"]) for each in events if each["ph"] == "X" and each["pid"] == at] for at in names]
    assert sorted(done[0]) == sorted(done[1]) == sorted(done[2])
    measured = sorted((event["ts"], event["tid"]) for event in events if event["ph"] == "X" and event["pid"] == 0)
    starts = [(round(one.start_ns / 1000, 3), stage) for stage, each in enumerate(late) for one in each.actions]
    assert measured == sorted(starts)


def test_what_a_run_writes_is_what_is_read(plan, tmp_path):
    path, times = tmp_path / "measured.json", planned_times(plan, RankLayout(dp=2, pp=4))
    write_measured(path, plan, times, 2, planned=False)
    found = read_measured(path)
    assert (found.plan.content_hash, found.times, found.dp, found.planned) == (plan.content_hash, times, 2, False)


def test_simulate_shows_what_a_run_has_measured(plan, tmp_path, command):
    """In place of a plan and of all that is asked of one; a trace is written beside."""
    run, trace = tmp_path / "run", tmp_path / "trace.json"
    run.mkdir()
    write_measured(run / "measured.json", plan, planned_times(plan, RankLayout(dp=2, pp=4), 5), 2, planned=True)
    ran = command("simulate", "--run", run, "--trace", trace)
    assert ran.code == 0 and "process 5 of 8 (stage 2 of pipeline 1) is slow: 2.0 times as long" in ran.out
    assert json.loads(trace.read_text())["otherData"] == {"plan": plan.content_hash}
    assert command("simulate", "--run", run / "measured.json").out == ran.out, "the file in place of the run"
    for words in (("--step", 0), ("--rank", 1), (plan.path,), ("--lengths", "9,8")):
        ran = command("simulate", *words, "--run", run)
        assert ran.code == 2 and "hint: beside it give --trace or --json alone" in ran.err
    assert command("simulate", "--run", tmp_path).code == 2


@pytest.mark.parametrize("planned", [True, False])
def test_json_has_what_the_table_of_a_run_has(plan, tmp_path, command, planned):
    """Of all pipelines, beside a trace or without one."""
    times = planned_times(plan, RankLayout(dp=2, pp=4), 5)
    write_measured(tmp_path / "measured.json", plan, times, 2, planned=planned)
    ran = command("simulate", "--run", tmp_path, "--json", "--trace", tmp_path / "trace.json")
    shown = json.loads(ran.out)
    assert (tmp_path / "trace.json").exists()
    assert (shown["plan"], shown["step"], shown["dp"]) == (str(plan.path), 0, 2)
    assert [each["pipeline"] for each in shown["pipelines"]] == [0, 1]
    for each in shown["pipelines"]:
        own = times[each["pipeline"] :: 2]
        ends = max(action.end_ns for of_stage in own for action in of_stage.actions)
        assert each["measured"]["makespan"] == pytest.approx(ends / 1e3)
        busy = [sum(action.end_ns - action.start_ns for action in of_stage.actions) / ends for of_stage in own]
        assert each["measured"]["busy_per_stage"] == pytest.approx(busy)
        assert each["replayed"]["makespan"] <= each["measured"]["makespan"]
        assert ("planned" in each) == planned
    assert shown["slow"] == ({"process": 5, "times": pytest.approx(2, rel=0.01)} if planned else None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda document: document["processes"][3]["actions"].pop(), "process 3 does not do"),
        (lambda document: document["processes"][3]["actions"][0].update(op="dance"), "process 3 does not do"),
        (lambda document: document["processes"][3]["actions"][0].update(end_ns=-1), "end_ns"),
        (lambda document: document["processes"].pop(), "not of the plan"),
        (lambda document: document.update(content_hash="0"), "not of the plan"),
        (lambda document: document.pop("dp"), "dp"),
        (lambda document: document.update(processes={}), r"`processes` is \{\}, expected a list"),
        (lambda document: document.update(plan=""), "`plan` is '', expected an absolute path"),
        (lambda document: document.update(plan="/a\0b"), "`plan` is .*, expected an absolute path"),
        (lambda document: document.update(dp=3), "not of the plan"),
    ],
)
def test_damaged_measurements_are_refused(plan, tmp_path, damage, message):
    path = tmp_path / "measured.json"
    write_measured(path, plan, planned_times(plan, RankLayout(dp=2, pp=4)), 2, planned=True)
    document = json.loads(path.read_text())
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=message):
        read_measured(path)
    with pytest.raises(UsageError, match="a run without measured times"):
        read_measured(tmp_path / "none.json")


def test_a_run_whose_plan_is_gone_is_named_with_what_to_do(analysis, tmp_path):
    path, plan = tmp_path / "measured.json", build_plan(analysis, tmp_path / "plan", dp=2, pp=4)
    write_measured(path, plan, planned_times(plan, RankLayout(dp=2, pp=4)), 2, planned=True)
    plan.path.rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"measured\.json: .*plan") as refused:
        read_measured(path)
    assert "put it back there" in refused.value.hint


def run_timed(rank, plan, config):
    """A step as one of all stages, and the moments before and after its clock began."""
    opened, analysis = open_plan(plan, pp=2)
    layout = choose_layout(opened, dist.get_world_size(), rank)
    model = new_model(read_config(config), torch.float32, seed=1)
    groups = make_groups(layout, torch.device("cpu"), timedelta(seconds=60))
    model = cut_stage(model, split_layers(model.config.num_hidden_layers, layout.num_model_stages), layout)
    executor = RankExecutor(model, links=groups.links(model.config.hidden_size, model.dtype))
    work = next(iter(PlanStream(opened, analysis, vocab_size=97, max_positions=256, layout=layout, prefetch=0)))
    clock = ActionClock(model.device)
    dist.barrier()
    before = perf_counter_ns()
    clock.start(0)
    after = perf_counter_ns()
    for each in work.ranks:
        executor.run(each, work.step.num_target_tokens, clock.around(each.dp_rank))
    return clock.stop(), (before, after)


def test_processes_are_at_least_as_long_at_it_as_a_replay_of_their_times(pool, analysis, tmp_path, tiny_config):
    plan = build_plan(analysis, tmp_path / "plan", dp=2, pp=2)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen2")))
    layout = RankLayout(dp=1, pp=2)
    found = pool.run(2, run_timed, plan=plan.path, config=tmp_path / "config.json")
    times = [each for each, _ in found]
    [played] = replayed(plan, times, layout)
    for stage, each in enumerate(times):
        assert busy_ns(played, stage) == sum(one.end_ns - one.start_ns for one in each.actions)
        assert all(one.start_ns >= 0 for one in each.actions)
    # Clocks of one machine are one clock; only their zeros are as far apart as the processes that set them.
    apart = (max(after for _, (_, after) in found) - min(before for _, (before, _) in found)) / 1000
    assert (
        max(row["busy_seconds"] for row in stage_rows([each.spent for each in times], layout)) * 1e6
        <= played.replayed.makespan + 0.001
    )
    assert played.replayed.makespan <= played.measured.makespan + apart


def busy_ns(played, stage):
    own = slice(*played.measured.actions.stages[stage : stage + 2])
    busy = [int((each.ends - each.starts)[own].sum()) for each in (played.measured, played.replayed)]
    assert busy[0] == busy[1]
    return busy[0]
