"""The charts of a page: which steps are drawn, what of them, and on which axes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import chunkplan
from chunkplan.errors import UsageError
from chunkplan.planfile.plan import Plan
from chunkplan.quantities import gibibytes
from chunkplan.reporting.page.candidates import (
    candidates_figure,
    candidates_table,
    choice_of_plan,
    limit_words,
)
from chunkplan.reporting.page.gantt import DrawnStep, drawn_steps, gantt_figure
from chunkplan.reporting.page.lengths import histogram, lengths_figure
from chunkplan.reporting.page.over_steps import over_steps_table, points, points_note
from chunkplan.reporting.page.ways import ways_figure, ways_table
from chunkplan.reporting.per_step import per_step, plan_chunks
from chunkplan.reporting.plan_memory import plan_memory
from chunkplan.reporting.slow_steps import step_times
from chunkplan.tuning.document_entries import PLAN_ENTRIES
from tests.support.page_cases import build_plan, write_and_read


def drawn_all(plan: Plan) -> list[DrawnStep]:
    """What a page draws of a plan."""
    chunks = plan_chunks(plan).frame
    steps = per_step(plan, chunks)
    median = step_times(steps, chunks, plan.config.dp, plan.config.pp).median_step
    return drawn_steps(plan, steps, median, None)


def actions_of(drawn: DrawnStep) -> list[Any]:
    """The traces of a step that draw actions: not those of the bubble and the critical path."""
    return [trace for trace in gantt_figure(drawn).data if trace.legendgroup]


def test_the_bubble_and_the_critical_path_are_drawn(plan: Plan) -> None:
    """The bubble is all the time in which stages do nothing; the path is that of the rank that is done last."""
    for each in drawn_all(plan):
        traces = {trace.name: trace for trace in gantt_figure(each).data}
        bubble, path = traces["bubble: nothing to do"], traces["critical path"]
        idle = sum(
            simulation.makespan * (1 - busy) / 1e6
            for simulation in each.ranks.values()
            for busy in simulation.busy_per_stage
        )
        rows = sum(simulation.pp for simulation in each.ranks.values())
        assert idle - rows * 0.02 * each.step.predicted_us / 1e6 <= bubble.x.sum() <= idle * (1 + 1e-9)
        last = max(each.ranks, key=lambda rank: each.ranks[rank].makespan)
        assert path.x.size == len(each.ranks[last].critical_actions)
        assert float((path.base + path.x).max()) == pytest.approx(each.step.predicted_us / 1e6, rel=1e-5)


def test_the_bars_of_a_step_end_when_the_plan_says(plan: Plan) -> None:
    drawn = drawn_all(plan)
    for each in drawn:
        assert set(each.ranks) == set(each.step.chunks)
        for rank, simulation in each.ranks.items():
            ends = simulation.ends[simulation.actions.stages[1:] - 1] / 1000
            said = [each.step.schedule_us[rank, stage] for stage in range(simulation.pp)]
            np.testing.assert_allclose(ends, said, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble", "zero-bubble-v"])
def test_every_action_is_a_bar_whatever_the_schedule(tmp_path: Path, schedule: str) -> None:
    plan = build_plan(tmp_path, schedule=schedule)
    for each in drawn_all(plan):
        figure = actions_of(each)
        done = [(action.op, action.chunk_id) for actions in each.step.actions.values() for action in actions]
        assert sorted(chunk for bars in figure for chunk in bars.text.tolist()) == sorted(chunk for _, chunk in done)
        assert {bars.legendgroup for bars in figure} == {op for op, _ in done}
        assert ("model stage" in figure[0].hovertemplate) == (schedule in ("interleaved", "zero-bubble-v"))
        end = max(float((bars.base + bars.x).max()) for bars in figure)
        assert end == pytest.approx(each.step.predicted_us / 1e6, rel=1e-5)


def test_a_step_that_is_asked_for_comes_first(tmp_path: Path, plan: Plan) -> None:
    labels = list(write_and_read(tmp_path / "page.html", plan, step=2).charts["gantt-chart"])
    assert labels[0].startswith("step 2: asked for")
    assert len(labels) == len({label.split(":")[0] for label in labels})
    with pytest.raises(UsageError, match="no step 4"):
        chunkplan.write_report(tmp_path / "page.html", plan, step=4)


def test_of_many_ranks_those_that_are_done_last_are_drawn(tmp_path: Path) -> None:
    plan = build_plan(tmp_path, dp=80, pp=1, global_batch=60)
    [only] = drawn_all(plan)
    ends = sorted((end for end in only.step.schedule_us.values()), reverse=True)
    assert len(only.ranks) == 64
    assert sorted((only.step.schedule_us[rank, 0] for rank in only.ranks), reverse=True) == ends[:64]
    chunkplan.write_report(tmp_path / "page.html", plan)
    assert "the 64 ranks that are done last, of 80" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.soak
def test_of_a_step_of_too_many_actions_the_first_are_drawn_and_it_is_said_so(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.full(12_000, 16))
    config = chunkplan.PlanConfig(chunk_size=16, k=1, global_batch=11_000)
    plan = chunkplan.build(tmp_path / "lengths.npy", tmp_path / "plan", config, workers=1)
    made = write_and_read(tmp_path / "page.html", plan)
    assert list(made.charts["gantt-chart"]) == ["step 0: first, slowest, least full", "step 1: median time, fastest"]
    assert "Of step 0, the first 5,000 of 22,000 actions." in made.text
    assert "Of step 1" not in made.text
    first, _ = drawn_all(plan)
    of_step, whole = (actions_of(each) for each in drawn_all(plan))
    assert sum(bars.x.size for bars in of_step) == 5000
    assert sum(bars.x.size for bars in whole) == 2000
    ends = [float((bars.base + bars.x).max()) for bars in of_step]
    assert gantt_figure(first).layout.xaxis.range == (0, max(ends))
    assert max(ends) < next(plan.iter_steps(0)).predicted_us / 1e6 / 4


def test_of_few_steps_all_are_drawn_and_of_many_the_odd_ones(tmp_path: Path, plan: Plan) -> None:
    labels = [each.label for each in drawn_all(plan)]
    assert sorted(label.split(":")[0] for label in labels) == [f"step {step}" for step in range(4)]
    many = build_plan(tmp_path, global_batch=2)
    drawn = drawn_all(many)
    assert 1 < len(drawn) <= 7
    assert all(each.why for each in drawn)
    made = write_and_read(tmp_path / "page.html", many)
    assert f"{len(drawn)} of 30 steps are here" in made.text


def test_a_plan_of_a_model_that_is_not_described_is_shown_without_what_takes_it(tmp_path: Path, plan: Plan) -> None:
    cost_model = {**plan.manifest["predictions"]["cost_model"], "precision": "unknown"}
    manifest = {**plan.manifest, "predictions": {**plan.manifest["predictions"], "cost_model": cost_model}}
    made = write_and_read(tmp_path / "page.html", replace(plan, manifest=manifest))
    assert "gantt-chart" not in made.charts
    assert "Steps are not drawn: the plan does not describe the model" in made.text
    assert "Memory: the plan does not describe the model" in made.text


def test_bars_of_lengths_end_at_powers_of_two() -> None:
    """A chunk that is full of a power of two is in the bar below ChunkSize, one more token in the next."""
    counted = histogram(np.array([1, 1023, 1024, 1025, 8192, 8193]))
    assert counted.counts.sum() == 6
    assert counted.tokens.sum() == 1 + 1023 + 1024 + 1025 + 8192 + 8193
    edges = {counted.edge(bar): count for bar, count in enumerate(counted.counts.tolist()) if count}
    assert [round(edge) for edge in edges] == [1, 1024, 1448, 8192, 11585]
    assert list(edges.values()) == [1, 2, 1, 1, 1]


def test_of_many_steps_runs_keep_the_least_and_the_most() -> None:
    rng = np.random.default_rng(0)
    values = {name: rng.random(25_003) for name in ("predicted_us", "lower_bound_us", "fill", "recompute_share")}
    steps = pl.DataFrame({"step": np.arange(25_003), "heaviest_over_mean": 1 + rng.random(25_003), **values})
    runs = points(steps)
    assert 900 < runs.height <= 1000
    assert (runs["first"][0], runs["last"][-1]) == (0, 25_002)
    assert runs["predicted_us_high"].max() == values["predicted_us"].max()
    assert runs["fill_low"].min() == values["fill"].min()
    assert runs["fill"][1] == pytest.approx(values["fill"][26:52].mean())
    assert "26 steps" in points_note(runs)[0]
    assert over_steps_table(runs).rows[0][0] == "0 to 25"
    assert points_note(points(steps.head(1000))) == []


@pytest.mark.parametrize("lengths", [[1], [37], [64], [5793], [3, 100_000], [1000] * 3 + [5000]])
def test_ticks_of_lengths_are_around_all_bars(lengths: list[int]) -> None:
    counted = histogram(np.array(lengths))
    axis = lengths_figure(counted, None, None).layout.xaxis
    first, last = axis.range
    assert first < counted.first - 1 < counted.first - 1 + counted.counts.size < last
    assert axis.tickvals[0] <= 2 * np.log2(min(lengths))
    assert 2 * np.log2(max(lengths)) <= axis.tickvals[-1] < last
    assert len(set(axis.ticktext)) == len(axis.tickvals) == len(axis.ticktext)
    assert len(set(np.diff(axis.tickvals))) <= 1 and len(axis.tickvals) <= 10, "as far apart from each other"
    assert len(axis.tickvals) > 1 or lengths == [1]


@pytest.mark.parametrize("changed", [None, "k", "checkpointing"])
def test_what_a_plan_was_built_with_is_marked_if_it_is_a_candidate(
    tuning: dict[str, Any], plan: Plan, changed: str | None
) -> None:
    document = json.loads(json.dumps(tuning))
    fitting = next(choice for choice in document["choices"] if choice["fits"] and choice != document["chosen"])
    built = {name: fitting[name] for name in PLAN_ENTRIES if name in fitting}
    cost_model = {name: fitting[name] for name in ("tp", "checkpointing", "kv_offload")}
    if changed is not None:
        fitting[changed] = 99 if changed == "k" else "another level"
    here = {**plan.manifest["predictions"]["cost_model"], **cost_model}
    manifest = {**plan.manifest, "config": {**plan.manifest["config"], **built}, "predictions": {"cost_model": here}}
    own = choice_of_plan(document, replace(plan, manifest=manifest))
    assert own == (fitting if changed is None else None)
    marked = [trace for trace in candidates_figure(document, own).data if trace.name == "this plan"]
    assert [(*trace.x, *trace.y) for trace in marked] == [
        (fitting["memory"]["total"] / 2**30, fitting["step_seconds"]) for _ in range(changed is None)
    ]
    notes = [row[-1] for row in candidates_table(document, own).rows]
    assert sum("this plan" in words for words in notes) == (changed is None)


@pytest.mark.parametrize(("gpu_memory", "is_near"), [(66 << 30, True), (9_000 << 30, False)])
def test_candidates_fill_their_chart_however_much_memory_there_is(
    tuning: dict[str, Any], gpu_memory: int, is_near: bool
) -> None:
    """A limit far from all of them is said, not drawn; axes have several ticks."""
    document = {**tuning, "options": {**tuning["options"], "gpu_memory": gpu_memory}}
    figure = candidates_figure(document, None)
    assert len(figure.layout.shapes) == is_near
    assert ("the dashed line" if is_near else "beyond the chart") in limit_words(document, None)
    assert f"{gpu_memory / 2**30:,.1f} GiB" in limit_words(document, None)
    for axis in (figure.layout.xaxis, figure.layout.yaxis):
        low, high = np.power(10, axis.range) if axis.type == "log" else axis.range
        assert axis.tickvals is None or sum(low <= tick <= high for tick in axis.tickvals) >= 3
        assert high < 8 * low


def test_ways_are_bars_fastest_first_and_those_that_do_not_fit_say_why(tuning: dict[str, Any]) -> None:
    first, *others = tuning["baselines"]
    document = {**tuning, "baselines": [{**first, "fits": False}, *({**row, "fits": True} for row in others)]}
    figure = ways_figure(document)  # type: ignore[arg-type]
    [bars] = figure.data
    assert list(bars.x) == sorted([row["step_seconds"] for row in (*others, tuning["chosen"])])
    labels = [label.text for label in figure.layout.annotations]
    assert f"{first['name']}: does not fit" in labels
    assert any(label.startswith(f"{gibibytes(first['memory']['total'])} a GPU at least, ") for label in labels)
    rows = ways_table(document).rows  # type: ignore[arg-type]
    assert rows[-1][:4] == (first["name"], "no fit", "-", "-") and "does not fit" in rows[-1][-1]


def test_memory_and_ranks_are_drawn(tmp_path: Path, plan: Plan) -> None:
    charts = write_and_read(tmp_path / "page.html", plan).charts
    parts = [bar["x"][0] for bar in charts["memory-chart"][""]["data"]]
    memory = plan_memory(plan, plan_chunks(plan).table)
    assert memory is not None and sum(parts) == pytest.approx(memory.memory.total / 2**30)
    for each in drawn_all(plan):
        [bars] = charts["ranks-chart"][each.label]["data"]
        assert max(bars["y"]) == pytest.approx(each.step.predicted_us / 1e6, rel=1e-5)
    one = build_plan(tmp_path, dp=1)
    charts = write_and_read(tmp_path / "page.html", one).charts
    assert "memory-chart" in charts and "ranks-chart" not in charts


def test_what_fits_is_drawn_each_baseline_by_its_symbol(tuning: dict[str, Any]) -> None:
    """And an axis that is logarithmic says so, one that is not does not."""
    beyond = {**tuning["choices"][0], "fits": False, "memory": {"total": 2 * tuning["options"]["gpu_memory"]}}
    figure = candidates_figure({**tuning, "choices": [*tuning["choices"], beyond]}, None)  # type: ignore[typeddict-item]
    traces = {trace.name: trace for trace in figure.data}
    fitting = [row for row in tuning["baselines"] if row["fits"]]
    for row in fitting:
        assert list(traces[row["name"]].y) == [row["step_seconds"]]
    assert len({traces[row["name"]].marker.symbol for row in fitting}) == len(fitting) > 0
    assert traces["chosen"].marker.symbol == "star-open"
    limit = tuning["options"]["gpu_memory"] / 2**30
    assert max(x for trace in figure.data for x in trace.x) <= limit
    for axis in (figure.layout.xaxis, figure.layout.yaxis):
        assert axis.title.text.endswith(", log scale") == (axis.type == "log")
    counted = histogram(np.array([100, 5000]))
    assert lengths_figure(counted, None, None).layout.xaxis.title.text.endswith(", log scale")
