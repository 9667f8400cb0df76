"""Simulations are true to the plan, to the figures that are published, and to themselves."""

from __future__ import annotations

from importlib import import_module
from inspect import getdoc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import chunkplan
from chunkplan.cost.model import CostModel
from chunkplan.errors import ChunkplanError, DataError, UsageError
from chunkplan.layers import FAMILIES
from chunkplan.planfile.plan import Action
from chunkplan.schedule.timeline import Simulation
from chunkplan.simulation import reschedule, simulate_lengths, simulate_plan

#: The example that every description of ChunkFlow agrees on, in tokens; times are in units of 1024.
EXAMPLE = [1024, 1024, 2048, 4096]


def example(chunk_size: int | None, k: int | None, schedule: str, **options: Any) -> Simulation:
    return simulate_lengths(EXAMPLE, chunk_size=chunk_size, k=k, pp=4, schedule=schedule, cost="unit", **options)


def drawn(simulation: Simulation, unit: int) -> str:
    """What each stage does in each unit of time: a chunk's letter, small in a backward, w in the half of weights."""
    width = round(simulation.makespan / unit)
    rows = [["."] * width for _ in range(simulation.pp)]
    for action in simulation.to_dict()["actions"]:
        letter = chr(ord("A") + action["chunk_id"])
        mark = {"backward": letter.lower(), "backward_input": letter.lower(), "backward_weight": "w"}
        for moment in range(round(action["start"] / unit), round(action["end"] / unit)):
            rows[action["stage"]][moment] = mark.get(action["op"], letter)
    return "\n".join(f"    s{stage} |{''.join(row)}|" for stage, row in enumerate(rows))


@pytest.mark.parametrize(
    ("schedule", "module", "k", "pp", "unit"),
    [
        ("algorithm2", "templates:state_aware_1f1b", 1, 1, 1024),
        ("1f1b", "templates:state_aware_1f1b", 2, 4, 1024),
        ("interleaved", "templates:state_aware_1f1b", 2, 4, 512),
        ("auto", "auto", 2, 4, 1024),
        ("zero-bubble", "auto", 2, 4, 1024),
        ("zero-bubble-v", "zero_bubble_v", 2, 4, 512),
        ("search", "search", 2, 4, 1024),
    ],
)
def test_a_schedule_does_what_its_docstring_draws(schedule: str, module: str, k: int, pp: int, unit: int) -> None:
    found = simulate_lengths(EXAMPLE, chunk_size=2048, k=k, pp=pp, schedule=schedule, cost="unit")
    file, _, function = module.partition(":")
    home = import_module(f"chunkplan.schedule.{file}")
    words = getdoc(getattr(home, function) if function else home)
    assert words is not None and drawn(found, unit) in words


@pytest.mark.parametrize(
    ("chunk_size", "k", "schedule", "makespan"),
    [
        (2048, 2, "1f1b", 46),
        (2048, 1, "1f1b", 48),
        (None, None, "1f1b", 56),
        (4096, 1, "1f1b", 60),
        (2048, 2, "search", 42),
        (2048, 1, "search", 44),
        (1024, 4, "search", 33),
        (None, None, "search", 52),
    ],
)
def test_the_example_takes_the_published_time(
    chunk_size: int | None, k: int | None, schedule: str, makespan: int
) -> None:
    found = example(chunk_size, k, schedule)
    assert (found.unit, found.makespan) == ("tokens", makespan * 1024)
    assert found.bubble == pytest.approx(1 - 24 / makespan)
    assert found.lower_bound <= found.makespan


def test_the_parts_of_a_virtual_stage_share_a_stage_in_whole_numbers() -> None:
    found = example(2048, 2, "interleaved", virtual_stages=2)
    assert found.makespan < example(2048, 2, "1f1b").makespan
    first = found.to_dict()["actions"][0]
    assert (first["start"], first["end"]) == (0, 1024)
    assert found.bubble == pytest.approx(1 - 24 * 1024 / found.makespan)


def test_whole_sequences_come_longest_first_and_unpacked() -> None:
    found = simulate_lengths([5, 9, 5, 7], chunk_size=None, pp=2)
    assert [chunk.num_tokens for chunk in found.chunks] == [9, 7, 5, 5]
    assert [chunk.segments[0].sequence_id for chunk in found.chunks] == [1, 3, 0, 2]
    assert all(chunk.group_id is None and chunk.keeps_activations for chunk in found.chunks)


LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=12)
PIPELINES = [(name, family.placement.virtual_stages) for name, family in FAMILIES.items() if name != "algorithm2"]
PIPELINES.append(("interleaved", 3))


@given(LENGTHS, st.integers(300, 2000), st.integers(1, 4), st.integers(2, 5), st.sampled_from(PIPELINES), st.booleans())
def test_what_a_simulation_says_fits_together(
    lengths: list[int], chunk_size: int, k: int, pp: int, pipeline: tuple[str, int], in_units: bool
) -> None:
    schedule, num_virtual = pipeline
    found = simulate_lengths(
        lengths,
        chunk_size=chunk_size,
        k=k,
        pp=pp,
        schedule=schedule,
        virtual_stages=num_virtual if num_virtual > 1 else None,
        cost="unit" if in_units else None,
    )
    assert found.lower_bound <= found.makespan
    check_consistency(found)
    if in_units:
        assert found.bubble == pytest.approx(1 - 3 * sum(lengths) / found.makespan)


def check_consistency(found: Simulation) -> None:
    """Time is busy or waiting; the critical path is one chain; what is held peaks where the schedule says it does."""
    for busy, waiting in zip(found.busy_per_stage, found.waiting_per_stage, strict=True):
        assert min(waiting.values()) >= 0
        assert busy + sum(waiting.values()) / found.makespan == pytest.approx(1)
    assert sum(found.critical_path.values()) == pytest.approx(found.makespan)
    assert set(found.critical_ranks) == {found.rank}
    path = [action.place for action in found.critical_actions]
    assert found.starts[path[0]] == 0
    assert found.in_unit(found.ends[path[-1]]) == found.makespan
    for before, after in pairwise(path):
        gap = found.starts[after] - found.ends[before]
        same_stage = found.stage_of[before] == found.stage_of[after]
        assert gap == (0 if same_stage else found.times.link[found.actions.chunk_ids[after]])
    assert [max(retained for _, retained, _ in held) for held in found.held] == found.peak_retained_tokens
    assert all(held[-1][1:] == (0, 0) for held in found.held), "nothing is held at the end"
    assert found.bubble == pytest.approx(np.mean(found.bubble_per_stage))
    recomputed = 1 - (1 - found.bubble) / np.mean(found.busy_per_stage)
    assert found.recompute_share == pytest.approx(recomputed, abs=1e-9)


def test_keys_and_values_are_held_until_the_first_part_is_backwarded() -> None:
    """One sequence of three parts and one chunk beside it, on one stage."""
    found = simulate_lengths([30, 10], chunk_size=10, k=1, cost="unit")
    assert found.held == [
        [
            *((0, 10, 0), (10, 10, 0)),  # F0 B0
            *((30, 0, 10), (40, 0, 20), (50, 10, 30), (60, 10, 30)),  # f1 f2 F3 B3
            *((80, 10, 30), (90, 10, 30), (110, 10, 30), (120, 10, 30), (140, 0, 0)),  # R2 B2 R1 B1
        ]
    ]
    assert (found.peak_retained_tokens, found.peak_kv_tokens) == ([10], [30])


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lengths") / "lengths.npy"
    np.save(path, np.random.default_rng(3).integers(10, 3000, 60))
    return path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pp": 3},
        {"pp": 2, "schedule": "interleaved"},
        {"pp": 2, "schedule": "zero-bubble"},
        {"pp": 3, "schedule": "zero-bubble-v"},
    ],
)
def test_a_step_of_a_plan_takes_the_time_that_the_plan_predicts(
    lengths: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    config = chunkplan.PlanConfig(chunk_size=1024, k=2, global_batch=25, dp=2, cp="off", **options)
    plan = chunkplan.build(lengths, tmp_path / "plan", config)
    for step in plan.iter_steps():
        for rank in range(2):
            found = simulate_plan(plan, step.step, rank=rank)
            ends = [found.in_unit(found.ends[last - 1]) for last in found.actions.stages[1:]]
            assert ends == pytest.approx([step.schedule_us[rank, stage] for stage in range(config.pp)], rel=1e-6)
            check_consistency(found)
        last = simulate_plan(tmp_path / "plan", step.step)
        assert last.makespan == pytest.approx(step.predicted_us, rel=1e-6)
        assert max(last.peak_retained_tokens) <= step.peak_retained_tokens
        again = reschedule(last, plan.config.schedule)
        assert (again.makespan, again.chunks) == (last.makespan, last.chunks)


def test_lengths_are_chunked_as_a_plan_of_them_is(tmp_path: Path) -> None:
    lengths = [700, 90, 2500, 1024, 30, 611, 5000]
    np.save(tmp_path / "lengths.npy", np.array(lengths))
    config = chunkplan.PlanConfig(chunk_size=1024, k=2, pp=2)
    planned = simulate_plan(chunkplan.build(tmp_path / "lengths.npy", tmp_path / "plan", config))
    supposed = simulate_lengths(lengths, chunk_size=1024, k=2, pp=2)
    assert supposed.chunks == planned.chunks
    assert supposed.ends.tolist() == planned.ends.tolist()


def test_a_cost_model_is_taken_at_its_word() -> None:
    slow, fast = (simulate_lengths([40_000, 100], chunk_size=8192, k=2, cost=CostModel(tp=tp)) for tp in (1, 4))
    assert slow.unit == "microseconds"
    assert fast.makespan < slow.makespan < 4 * fast.makespan


def test_schedules_are_compared_on_the_same_chunks() -> None:
    base = example(2048, 1, "1f1b")
    compared = chunkplan.compare_schedules(base, ["1f1b", "interleaved", "zero-bubble"], virtual_stages=4)
    assert compared[0] is base
    assert [found.virtual_stages for found in compared] == [1, 4, 1]
    assert all(found.chunks == base.chunks for found in compared)


def test_a_schedule_that_is_named_twice_is_compared_once() -> None:
    compared = chunkplan.compare_schedules(example(2048, 1, "1f1b"), ["auto", "1f1b", "auto"])
    assert [found.schedule for found in compared] == ["auto", "1f1b"]


def test_search_fits_the_memory_it_is_given() -> None:
    found = example(2048, 2, "search", memory_tokens=4096)
    assert max(found.peak_retained_tokens) <= 4096
    assert found.makespan >= example(2048, 2, "search").makespan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": []}, "there are no lengths"),
        ({"lengths": [4, 0]}, "a length is 0"),
        ({"lengths": [4, True]}, "a length is True"),
        ({"lengths": [2**31]}, "a length is 2147483648"),
        ({"lengths": [2**31 - 1], "chunk_size": 1}, "too many to simulate"),
        ({"k": None}, "k is missing"),
        ({"chunk_size": 0}, "chunk-size is 0"),
        ({"schedule": "2f2b"}, "1f1b or interleaved"),
        ({"schedule": "algorithm2"}, "is for one stage"),
        ({"schedule": "1f1b", "pp": 1}, "is for two stages or more"),
        ({"virtual_stages": 2}, "has one virtual stage"),
        ({"memory_tokens": 5}, "below one chunk"),
        ({"memory_tokens": 10}, "allows"),
        ({"memory_tokens": 10, "schedule": "search"}, "allows"),
        ({"pp": 29}, "28 layers"),
        ({"pp": 10, "schedule": "interleaved", "virtual_stages": 3}, "28 layers"),
    ],
)
def test_what_cannot_be_simulated_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"lengths": [20, 5], "chunk_size": 10, "k": 2, "pp": 2, **changes}
    with pytest.raises(UsageError) as refused:
        simulate_lengths(given.pop("lengths"), **given)
    assert message in str(refused.value)
    assert refused.value.hint


def test_a_comparison_refuses_what_no_schedule_in_it_takes() -> None:
    base = example(2048, 1, "1f1b")
    with pytest.raises(UsageError, match="virtual-stages is for interleaved"):
        chunkplan.compare_schedules(base, ["1f1b"], virtual_stages=2)
    with pytest.raises(UsageError, match="max-activation-tokens is for auto"):
        chunkplan.compare_schedules(base, ["1f1b"], memory_tokens=8192)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([("forward", 0), ("backward", 0), ("backward", 7)], "is not of this step"),
        ([("think", 0)], "think of chunk 0 on virtual stage 0 is not of this step"),
        ([], "has no actions"),
    ],
)
def test_a_damaged_schedule_is_named(
    lengths: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actions: list[tuple[str, int]], message: str
) -> None:
    plan = chunkplan.build(lengths, tmp_path / "plan", chunkplan.PlanConfig(chunk_size=4096, k=1, global_batch=1))
    step = next(plan.iter_steps())
    step.actions[0, 0][:] = [Action(op, chunk, 0) for op, chunk in actions]
    monkeypatch.setattr(type(plan), "iter_steps", lambda self, start: iter([step]))
    with pytest.raises(DataError, match=message):
        simulate_plan(plan)


def test_a_plan_whose_stages_wait_for_each_other_is_named(
    lengths: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = chunkplan.PlanConfig(chunk_size=4096, k=1, global_batch=1, pp=2)
    plan = chunkplan.build(lengths, tmp_path / "plan", config)
    step = next(plan.iter_steps())
    step.actions[0, 0].reverse()
    monkeypatch.setattr(type(plan), "iter_steps", lambda self, start: iter([step]))
    with pytest.raises(DataError, match="stages deadlock"):
        simulate_plan(plan)


@pytest.mark.parametrize(("step", "rank"), [(3, None), (-1, None), (0, 2), (0, -1)])
def test_a_step_or_rank_that_is_not_there_is_refused(
    lengths: Path, tmp_path: Path, step: int, rank: int | None
) -> None:
    config = chunkplan.PlanConfig(chunk_size=4096, k=1, global_batch=25, dp=2)
    plan = chunkplan.build(lengths, tmp_path / "plan", config)
    with pytest.raises(ChunkplanError, match="there is no") as refused:
        simulate_plan(plan, step, rank=rank)
    assert "0 to" in refused.value.hint
