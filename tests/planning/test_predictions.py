"""What the planner predicts of steps: time, its lower bound, memory, and how even ranks are."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chunkplan
from chunkplan import PlanConfig, build, validate
from chunkplan.config.plan import Split
from chunkplan.cost.durations import durations, link_times
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import shape_of_config
from chunkplan.errors import UsageError
from chunkplan.operations import OPS
from chunkplan.planfile.chunks import read_chunks
from chunkplan.planfile.manifest import attention_patterns_of
from chunkplan.planning.chunks import time_chunks
from chunkplan.simulation import simulate_plan
from tests.support.plain import plain_cost
from tests.support.planned_steps import first_step, save
from tests.support.published_models import MODELS

#: What a chunk costs beside its tokens, forward and backward, in microseconds.
COST = plain_cost()

CHUNK_US = COST.chunk_ns / 1e3


def test_costs_grow_with_the_prefix_and_recompute(tmp_path: Path) -> None:
    """Of equal parts the later one costs more attention, and one that is recomputed costs a forward more."""
    plan = first_step(tmp_path, [3 * 8192], chunk_size=8192, k=2, keep_attention="off")
    first, second, third = plan.chunks[0]
    assert not first.keeps_activations
    assert second.keeps_activations
    assert third.keeps_activations
    assert third.cost > second.cost
    [whole] = first_step(tmp_path, [3 * 8192], chunk_size=3 * 8192).chunks[0]
    again = plan.recompute_us
    assert first.cost - again + second.cost + third.cost == pytest.approx(whole.cost + 2 * CHUNK_US, rel=1e-6)
    [layers] = durations(np.array([8192]), np.array([8192.0**2]), COST.rates, [COST.shape.num_layers])[
        OPS.index("forward_kv")
    ].tolist()
    assert again == pytest.approx(layers[0] / 1e3, rel=1e-6)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "Llama-4-Scout", "Qwen3-Next-80B-A3B", "Mamba-Codestral-7B"])
@pytest.mark.parametrize("split", ["full", "cost"])
def test_costs_of_chunks_are_those_of_the_model_in_the_manifest(name: str, split: Split, tmp_path: Path) -> None:
    """Whatever its layers see: those that are written are those that a reader works out."""
    cost = CostModel(shape=shape_of_config(MODELS[name].config, ""))
    lengths = np.random.default_rng(0).integers(1, 60_000, 40).astype(np.int32)
    config = PlanConfig(chunk_size=8192, k=2, global_batch=20, dp=2, cp="off", pp=2, split=split)
    plan = build(save(tmp_path, lengths), tmp_path / "plan", config, cost=cost)
    assert validate(plan.path).ok
    chunks = read_chunks(plan.chunks(), attention_patterns_of(plan.manifest))
    written = chunks.cost.copy()
    _, cost_ns, _ = time_chunks(chunks, plan.config, plan.cost)
    assert written.tolist() == (cost_ns / 1e3).astype(np.float32).tolist()
    assert chunks.attention_pairs.sum() <= (lengths.astype(float) ** 2).sum()
    for step in plan.iter_steps():
        simulated = simulate_plan(plan, step.step)
        assert simulated.makespan == pytest.approx(step.predicted_us, rel=1e-6)
    if split == "cost" and name == "Mamba-Codestral-7B":
        assert chunks.group_size.max() == -(-int(lengths.max()) // 8192)  # parts of one length take as long


def test_predictions_follow_from_the_costs_of_chunks(tmp_path: Path) -> None:
    """One stage takes the sum of its chunks; one chunk takes as long on four stages as on one, and the links."""
    lengths = [60_000, 9_000, 500]
    one = first_step(tmp_path, lengths, chunk_size=8192, k=2)
    total = sum(chunk.cost for chunk in one.chunks[0])
    assert one.predicted_us == pytest.approx(total, rel=1e-6)
    assert one.schedule_us[0, 0] == pytest.approx(total, rel=1e-6)
    assert one.lower_bound_us == pytest.approx(total - one.recompute_us, rel=1e-6)

    staged = first_step(tmp_path, lengths, chunk_size=70_000, pp=4)
    [chunk] = staged.chunks[0]
    tokens, attention_pairs = np.array([sum(lengths)]), np.array([sum(length**2 for length in lengths)], float)
    by_op = durations(tokens, attention_pairs, COST.rates, [7, 7, 7, 7])[:, :, 0] / 1e3
    forward, backward = by_op[OPS.index("forward")], by_op[OPS.index("backward")]
    link = link_times(tokens, COST.rates)[0] / 1e3
    assert chunk.cost == pytest.approx(sum(forward) + sum(backward), rel=1e-6)
    assert staged.predicted_us == pytest.approx(chunk.cost + 6 * link, rel=1e-6)
    ends = [staged.schedule_us[0, stage] for stage in range(4)]
    assert ends == sorted(ends, reverse=True)
    assert ends[3] == pytest.approx(sum(forward) + 3 * link + backward[3], rel=1e-6)
    assert staged.lower_bound_us == pytest.approx(chunk.cost / 4, rel=1e-6)


@pytest.mark.parametrize("pp", [2, pytest.param(3, marks=pytest.mark.soak)])
@settings(max_examples=6)
@given(lengths=st.lists(st.integers(1, 130), min_size=1, max_size=12), k=st.integers(1, 3))
def test_searched_plans_keep_every_invariant_and_their_memory(lengths: list[int], pp: int, k: int) -> None:
    """With the least memory that K allows, and with none to spare: no slower than the template where that fits."""
    config = PlanConfig(chunk_size=16, k=k, global_batch=6, pp=pp)
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), lengths)
        template = build(path, Path(folder) / "template", config)
        most = int(template.steps().column("peak_retained_tokens").to_numpy().max())
        searched = build(
            path, Path(folder) / "searched", replace(config, schedule="search", memory_tokens=max(most, 16))
        )
        assert validate(searched.path).ok
        slower, faster = (plan.steps().column("predicted_us").to_numpy() for plan in (template, searched))
        assert (faster <= slower).all()
        assert searched.steps().column("peak_retained_tokens").to_numpy().max() <= max(most, 16)


def test_a_memory_bound_that_cannot_be_kept_names_the_step_and_what_is_needed(tmp_path: Path) -> None:
    """Below one chunk, below what K chunks need, or below what the template takes."""
    lengths = save(tmp_path, [100, 90, 3, 4, 5])
    given: dict[str, Any] = {"chunk_size": 8, "k": 4, "pp": 2}
    with pytest.raises(UsageError, match="below one chunk of 8"):
        PlanConfig(**given, memory_tokens=7)
    with pytest.raises(UsageError, match="step 0, rank 0: a stage has to hold activations of 28 tokens") as error:
        build(lengths, tmp_path / "plan", PlanConfig(**given, memory_tokens=16, schedule="search"))
    assert "--max-activation-tokens 28" in error.value.hint
    one = given | {"k": 1}
    with pytest.raises(UsageError, match="step 0, rank 0: 1f1b holds activations of") as error:
        build(lengths, tmp_path / "plan", PlanConfig(**one, memory_tokens=8, schedule="1f1b"))
    assert "schedule auto, which fits" in error.value.hint
    assert not (tmp_path / "plan").exists()
    assert build(lengths, tmp_path / "plan", PlanConfig(**one, memory_tokens=8))


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "search", "zero-bubble", "zero-bubble-v", "interleaved"])
def test_the_memory_that_a_refusal_names_is_enough_for_all_ranks_of_the_step(tmp_path: Path, schedule: str) -> None:
    """It is that of the rank that needs most. Schedules that do not look for what fits name one that does."""
    lengths = save(tmp_path, [17, 9, 30, 3, 29, 25, 20, 20])
    given: dict[str, Any] = {"chunk_size": 8, "k": 4, "dp": 2, "pp": 2, "cp": "off", "global_batch": 8}
    with pytest.raises(UsageError, match="a stage has to hold activations of 30 tokens at once") as error:
        build(lengths, tmp_path / "plan", PlanConfig(**given, memory_tokens=8, schedule=schedule))
    assert "--max-activation-tokens 30 is the least for all ranks of the step" in error.value.hint
    enough = PlanConfig(**given, memory_tokens=30, schedule=schedule)
    if schedule in ("1f1b", "interleaved", "zero-bubble-v"):
        with pytest.raises(UsageError, match=f"{schedule} holds activations of") as error:
            build(lengths, tmp_path / "plan", enough)
        assert error.value.hint.startswith("use schedule auto, which fits")
        enough = replace(enough, schedule="auto", virtual_stages=1)
    assert max(build(lengths, tmp_path / "plan", enough).steps().column("peak_retained_tokens").to_pylist()) <= 30


def test_a_sequence_that_exceeds_its_ranks_share_is_reported_with_the_bound(tmp_path: Path) -> None:
    """No spread over ranks takes less than the longest sequence alone."""
    step = first_step(tmp_path, [100_000, 900, 800], chunk_size=8192, k=13, dp=2)
    assert step.exceeds_share
    plan = chunkplan.load_plan(tmp_path / "plan")
    summary = chunkplan.summarize_plan(plan.steps(), plan.chunks(), plan.manifest)
    assert (summary.num_exceeding_steps, summary.exceeding_share) == (1, 1)
    alone = first_step(tmp_path, [100_000], chunk_size=8192, k=13)
    assert step.lower_bound_us == pytest.approx(alone.predicted_us - 12 * CHUNK_US, rel=1e-6)
    assert step.predicted_us == pytest.approx(alone.predicted_us, rel=1e-6)
    assert not first_step(tmp_path, [900] * 8, chunk_size=8192, dp=2).exceeds_share
    plan = chunkplan.load_plan(tmp_path / "plan")
    summary = chunkplan.summarize_plan(plan.steps(), plan.chunks(), plan.manifest)
    assert (summary.heaviest_over_mean, summary.exceeding_share) == (pytest.approx(1), 0)


@settings(max_examples=60)
@given(st.integers(1, 3000), st.integers(1, 4), st.sampled_from([100, 1000, 8192]), st.integers(1, 2))
def test_a_step_of_equal_ranks_is_balanced_and_its_bound_is_not_above_its_time(
    length: int, dp: int, chunk_size: int, pp: int
) -> None:
    """...whatever the rounding: one sequence of the same length on each, or the only one on the only rank."""
    with tempfile.TemporaryDirectory() as folder:
        step = first_step(Path(folder), [length] * dp, chunk_size=chunk_size, dp=dp, pp=pp)
    assert not step.exceeds_share
    assert step.lower_bound_us <= step.predicted_us


@pytest.mark.parametrize("balance", ["spread", "search"])
@pytest.mark.parametrize("equal_chunks", [False, True])
def test_search_never_makes_a_step_slower(tmp_path: Path, balance: str, equal_chunks: bool) -> None:
    """...and its plans keep every invariant."""
    lengths = (np.arange(1, 65) ** 2 % 61 * 37 + 90).tolist()
    config = {"chunk_size": 1024, "k": 2, "dp": 3, "global_batch": 16, "equal_chunks": equal_chunks}
    (tmp_path / "spread").mkdir()
    spread = first_step(tmp_path / "spread", lengths, **config)
    assert first_step(tmp_path, lengths, **config, balance=balance).predicted_us <= spread.predicted_us
