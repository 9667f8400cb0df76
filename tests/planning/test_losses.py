"""The forwards that a loss adds are in the predicted times of a plan and of what is tuned; all else stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chunkplan import CostModel, PlanConfig, build, load_plan, simulate_plan, summarize_plan, validate
from chunkplan.config.losses import LOSSES
from chunkplan.errors import UsageError
from chunkplan.operations import FORWARDS, OPS
from chunkplan.planfile.chunks import chunks_of_rows, times_of
from chunkplan.planfile.plan import Plan
from chunkplan.schedule.forwards import extra_forwards
from chunkplan.tuning.bound import step_bound_ns, work_of_steps
from chunkplan.tuning.options import LADDER, TuneOptions
from chunkplan.tuning.sampling import sample_steps
from chunkplan.tuning.trial import try_out
from chunkplan.tuning.tune import tune
from tests.support.analyses import write_analysis, write_groups

LENGTHS = [900, 30, 4000, 77, 2500, 1000, 640, 3000, 50, 8000, 1200, 333]
WAYS: dict[str, dict[str, Any]] = {
    "one stage": {},
    "ranks that share": {"dp": 4},
    "a pipeline": {"pp": 4, "schedule": "1f1b"},
    "orders found": {"pp": 2, "dp": 2, "schedule": "auto", "cp": "off"},
    "virtual stages": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "a V": {"pp": 2, "schedule": "zero-bubble-v"},
}


def planned(folder: Path, cost: CostModel, loss: str, **options: Any) -> Plan:
    np.save(folder / "lengths.npy", np.array(LENGTHS))
    config = PlanConfig(chunk_size=1024, k=1, global_batch=8, loss=loss, **options)
    return build(folder / "lengths.npy", folder / loss, config, cost=cost)


def of_one_forward(plan: Plan, step: int) -> float:
    """Microseconds of a forward of all chunks in the order of the plan, on stages that wait only for the one before."""
    found, config = list(plan.iter_steps())[step], plan.config
    ends = []
    for rank, rows in found.chunks.items():
        chunks = chunks_of_rows(rows, plan.cost.shape.attention_patterns)
        times = times_of(chunks, plan.cost, config)
        done: dict[int, int] = {}  # by chunk, on the stage before
        for stage in range(config.pp):
            now = 0
            for action in found.actions[rank, stage]:
                if action.op in FORWARDS:
                    arrives = done[action.chunk_id] + int(times.link[action.chunk_id]) if stage else 0
                    now = max(now, arrives) + int(times.durations[OPS.index("forward"), stage, action.chunk_id])
                    done[action.chunk_id] = now
            ends.append(now)
    return max(ends) / 1e3


@pytest.mark.parametrize("sharding", ["optimizer", "weights"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_takes_longer_by_a_forward_of_all_its_chunks_and_nothing_else_changes(
    tmp_path: Path, way: str, sharding: Any
) -> None:
    cost = CostModel(sharding=sharding)
    plain, plan = (planned(tmp_path, cost, loss, **WAYS[way]) for loss in ("sft", "own"))
    assert "loss" not in plain.manifest["config"] and plan.manifest["config"]["loss"] == "own"
    assert validate(plan.path).ok
    assert plain.chunks().equals(plan.chunks())
    before, after = (each.schedule().drop_columns("predicted_us") for each in (plain, plan))
    assert before.equals(after)
    for one, other in zip(plain.iter_steps(), plan.iter_steps(), strict=True):
        assert one.extra_forward_us == 0 < other.extra_forward_us
        assert np.isclose(other.predicted_us, one.predicted_us + other.extra_forward_us, rtol=1e-6)
        assert one.lower_bound_us < other.lower_bound_us <= other.predicted_us
        assert np.isclose(max(other.schedule_us.values()), other.predicted_us)
        if way in ("one stage", "a pipeline"):
            assert np.isclose(other.extra_forward_us, of_one_forward(plan, other.step), rtol=1e-6)
        simulation = simulate_plan(plan, other.step)
        assert simulation.extra_forward == simulation.to_dict()["extra_forward"] == other.extra_forward_us
        assert np.isclose(simulation.makespan + other.extra_forward_us, other.predicted_us, rtol=1e-6)
    extra = summarize_plan(plan.steps(), plan.chunks(), plan.manifest).extra_forward_us
    sums = [each.manifest["predictions"]["predicted_us"] for each in (plain, plan)]
    assert np.isclose(sums[1] - sums[0], extra, rtol=1e-4)


def test_the_reference_model_is_a_forward_more_where_adapters_are_left_out_for_it() -> None:
    of_all, of_adapters = CostModel(), CostModel(lora_rank=8)
    for loss, described in LOSSES.items():
        number = extra_forwards(loss, of_all, has_reference=False)
        assert number == described.extra_forwards == (loss not in ("sft", "distillation"))
        assert extra_forwards(loss, of_adapters, has_reference=True) == number
        assert extra_forwards(loss, of_adapters, has_reference=False) == number + (described.reference == "always")


def test_a_plan_of_samples_is_for_their_usual_loss_and_one_of_other_data_is_refused(tmp_path: Path) -> None:
    folder = write_groups(tmp_path / "rollouts", [3, 2, 4])
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS))
    config = PlanConfig(chunk_size=64, k=1, global_batch=4)
    assert build(folder, tmp_path / "plan", config).config.loss == "grpo"
    assert build(tmp_path / "lengths.npy", tmp_path / "ordinary", config).config.loss == "sft"
    for data, loss in ((folder, "dpo"), (tmp_path / "lengths.npy", "grpo")):
        with pytest.raises(UsageError, match=f"the loss {loss} is of"):
            build(data, tmp_path / "plan", PlanConfig(chunk_size=64, k=1, loss=loss))
        with pytest.raises(UsageError, match=f"the loss {loss} is of"):
            tune(data, TuneOptions(loss=loss))
    assert load_plan(tmp_path / "plan").config.loss == "grpo"


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "pp": 2}])
def test_what_is_tuned_counts_the_forwards_and_its_bound_does_too(layout: dict[str, int]) -> None:
    tokens = np.array(LENGTHS, np.int32)
    outcomes = []
    for loss in ("sft", "own"):
        options = TuneOptions(loss=loss, global_batch=4, **layout)
        place = options.layouts()[0]
        config = options.plan_config(place, 1024, 1, options.schedules_of(place)[0])
        cost = options.cost(place, LADDER[0], "weights")
        sample = sample_steps(tokens, config, cost, 100)
        outcomes.append(try_out(sample, config, cost))
        bound = step_bound_ns(work_of_steps(sample, cost.shape.attention_patterns), config, cost)
        assert bound <= outcomes[-1].step_ns
    plain, found = outcomes
    assert plain.extra_ns == 0 < found.extra_ns
    assert np.isclose(found.step_ns, plain.step_ns + found.extra_ns)
    assert (plain.peaks == found.peaks).all()


def test_tokens_that_sequences_share_go_forward_once_for_a_loss_too(tmp_path: Path) -> None:
    prompt, folder = np.arange(2000) % 50, tmp_path / "analysis"
    write_analysis(folder, [(np.append(prompt, np.full(100, answer)), np.arange(2100) >= 2000) for answer in range(8)])
    how: dict[str, Any] = {"chunk_size": 1024, "k": 1, "global_batch": 8, "loss": "own"}
    apart, together = (
        build(folder, tmp_path / f"plan-{shared}", PlanConfig(**how, share_prefixes=shared)) for shared in (False, True)
    )
    [one], [other] = apart.iter_steps(), together.iter_steps()
    assert 0 < 3 * other.extra_forward_us < one.extra_forward_us
    assert other.lower_bound_us <= other.predicted_us


def test_ways_of_today_run_the_same_loss_as_the_plan(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS * 4))
    plain, found = (
        tune(tmp_path / "lengths.npy", TuneOptions(gpus=2, global_batch=16, chunk_sizes=(1024,), ks=(1,), loss=loss))
        for loss in ("sft", "own")
    )
    assert all(1.1 < b.step_ns / a.step_ns < 1.6 for a, b in zip(plain.baselines, found.baselines, strict=True))
    assert found.best.extra_ns > 0 and found.best.config.loss == "own"
