"""Sampled steps: they stand for all steps, and for the plan that is made of these."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import chunkplan
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.planfile.manifest import reduction_us_of
from chunkplan.tuning.options import GpuLayout
from chunkplan.tuning.sampling import sample_steps
from chunkplan.tuning.trial import try_out
from tests.support.tuning_cases import long_tail, options_with


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 20), st.integers(0, 3))
def test_sampled_steps_stand_for_all_steps_once(count: int, global_batch: int, num_strata: int, seed: int) -> None:
    """Weights are shares of all steps; the longest sequence of every length class is in one of the steps."""
    tokens = long_tail(count, seed=seed)
    config = PlanConfig(chunk_size=1024, k=1, global_batch=global_batch, seed=seed)
    sample = sample_steps(tokens, config, CostModel(), num_strata)
    assert sample.weights.sum() == pytest.approx(1)
    assert sample.sizes.sum() == sample.num_tokens.size
    assert (sample.sizes <= global_batch).all()
    for each in sample.classes:
        members = tokens[(tokens > each.over) & (tokens <= 2 * each.over)]
        first = sample.first_of_step
        assert (
            each.longest
            == members.max()
            == sample.num_tokens[first[each.step] : first[each.step + 1]].max(
                where=sample.num_tokens[first[each.step] : first[each.step + 1]] <= 2 * each.over, initial=0
            )
        )
    assert (tokens.max() <= 1024) == (sample.classes == ())


def test_a_sample_of_all_steps_takes_what_the_plan_is_predicted_to_take(lengths: Path, tmp_path: Path) -> None:
    """The same planner, the same schedule, the same simulation: nothing of its own that could differ."""
    few = tmp_path / "few.npy"
    np.save(few, np.load(lengths)[:2000])
    for pp, schedule in ((1, "algorithm2"), (2, "1f1b"), (2, "zero-bubble"), (2, "interleaved"), (2, "zero-bubble-v")):
        config = PlanConfig(chunk_size=4096, k=2, global_batch=64, dp=2, pp=pp, schedule=schedule, seed=3)
        sample = sample_steps(np.load(few), config, CostModel(), 10**6)
        outcome = try_out(sample, config, CostModel())
        plan = chunkplan.build(few, tmp_path / f"{schedule}{pp}", config)
        predicted = plan.steps().column("predicted_us").to_numpy().mean() + reduction_us_of(plan.manifest)
        assert outcome.step_ns / 1e3 == pytest.approx(predicted, rel=1e-5)
        retained = plan.steps().column("peak_retained_tokens").to_numpy()
        assert outcome.peaks[1, :, :, 0].max() <= retained.max() * (config.virtual_stages or 1)


def test_strata_of_equal_work_estimate_the_mean_step_closely(lengths: Path) -> None:
    """48 of 188 steps: within 2 % of all of them, for every configuration, although few steps take most of the time."""
    everything, some = (
        sample_steps(
            np.load(lengths), options_with().plan_config(GpuLayout(1, 4, 2), 8192, 4, "1f1b"), CostModel(), count
        )
        for count in (10**6, 48)
    )
    for chunk_size, k in product((2048, 32768), (1, 16)):
        config = options_with().plan_config(GpuLayout(1, 4, 2), chunk_size, k, "1f1b")
        exact, estimated = (try_out(sample, config, CostModel(tp=4)).step_ns for sample in (everything, some))
        assert estimated == pytest.approx(exact, rel=0.02)
