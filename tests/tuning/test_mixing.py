"""Levels of activation checkpointing layer by layer: the integer program finds the best, and plans fit with it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import chunkplan
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.activations import working_bytes_per_token
from chunkplan.cost.checkpointing import CHECKPOINTINGS, levels_of
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import shape_of_config
from chunkplan.planning.memory import memory_of_stages
from chunkplan.tuning.document import answers, read_tuning, read_tuning_document, tuned, write_tuning
from chunkplan.tuning.mixing import fastest_fitting, fewest_ns, mixture
from chunkplan.tuning.mixing import mixed as mixed_outcomes
from chunkplan.tuning.sampling import Sample, sample_steps
from chunkplan.tuning.trial import try_out
from chunkplan.tuning.tune import Tuning, tune
from tests.support.published_models import MODELS
from tests.support.tuning_cases import GIB, long_tail, options_with

SMALL = PlanConfig(chunk_size=8192, k=4, global_batch=64, pp=4, schedule="1f1b")
COST = CostModel()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_program_finds_what_a_search_of_all_finds(data: st.DataObject) -> None:
    """With layers of up to two kinds, three levels and several moments."""
    counts = np.array(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    num_moments = data.draw(st.integers(1, 3))
    sizes = st.lists(st.integers(0, 50), min_size=3 * counts.size, max_size=3 * counts.size)
    held = np.array([data.draw(sizes) for _ in range(num_moments)]).reshape(num_moments, counts.size, 3)
    room = np.array(data.draw(st.lists(st.integers(-5, 250), min_size=num_moments, max_size=num_moments)))
    again_ns = np.array(data.draw(st.lists(st.integers(0, 1000), min_size=3, max_size=3)))
    of_kinds = [list(combinations_with_replacement(range(3), int(count))) for count in counts]
    best = min(
        (
            sum(int(again_ns[level]) for levels in of_layers for level in levels)
            for of_layers in product(*of_kinds)
            if all(
                sum(moment[kind, level] for kind, levels in enumerate(of_layers) for level in levels) <= most
                for moment, most in zip(held, room, strict=True)
            )
        ),
        default=None,
    )
    found = fewest_ns(counts, held, room, again_ns)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert found.min() >= 0 and found.sum(axis=1).tolist() == counts.tolist()
    assert ((held * found).sum(axis=(1, 2)) <= room).all()
    assert int((found @ again_ns).sum()) == best


@pytest.fixture(scope="module")
def sample() -> Sample:
    return sample_steps(long_tail(3_000), SMALL, COST, 8, 8)


def moments_of(sample: Sample, config: PlanConfig, cost: CostModel) -> np.ndarray:
    return try_out(sample, config, cost).peaks[0]


def strength(levels: tuple[str, ...]) -> int:
    return sum(CHECKPOINTINGS.index(level) for level in levels)


def test_early_stages_of_1f1b_take_stronger_levels(sample: Sample) -> None:
    found = mixture(SMALL, COST, moments_of(sample, SMALL, COST), 64 * GIB, sample)
    assert found is not None
    levels = levels_of(found, 28)
    of_stages = [strength(levels[start : start + 7]) for start in range(0, 28, 7)]
    assert of_stages[0] >= of_stages[1] >= of_stages[2] and of_stages[0] > of_stages[2]  # the last one has the head
    for start in range(0, 28, 7):
        of_stage = [CHECKPOINTINGS.index(level) for level in levels[start : start + 7]]
        assert all(first >= second for first, second in pairwise(of_stage))


def test_the_fuller_the_gpu_the_more_runs_again_until_nothing_fits(sample: Sample) -> None:
    moments = moments_of(sample, SMALL, COST)
    found = [mixture(SMALL, COST, moments, gib * GIB, sample) for gib in (400, 80, 60, 30)]
    assert found[0] == "none" and found[-1] is None
    assert found[1] is not None and found[2] is not None
    assert strength(levels_of(found[1], 28)) < strength(levels_of(found[2], 28))


def test_layers_of_several_kinds_each_have_a_level(sample: Sample) -> None:
    """Of Gemma 3, whose layers with windows hold as much as the others, the sum over all layers is what counts."""
    shape = shape_of_config(MODELS["Gemma-3-27B"].config, "")
    cost = CostModel(shape=shape, tp=2)
    config = replace(SMALL, chunk_size=2048)
    outcomes = [try_out(sample, config, replace(cost, checkpointing=level)) for level in ("none", "full")]
    most, least = (outcome.memory(outcome.cost).total for outcome in outcomes)
    found = mixture(config, cost, outcomes[0].peaks[0], (most + 2 * least) // 3, sample)
    assert found is not None and len(set(levels_of(found, shape.num_layers))) > 1


def test_one_level_that_just_fits_is_found(sample: Sample) -> None:
    """The backward of stronger levels, which hold more of a layer at work, does not count where none needs them."""
    cost = replace(COST, checkpointing="keep-products")
    moments = moments_of(sample, SMALL, cost)
    needed = max(stage.total for moment in moments for stage in memory_of_stages(SMALL, cost, moment))
    found = mixture(SMALL, COST, moments, needed + 64, sample)  # bytes of each stage are rounded up part by part
    assert found is not None and set(levels_of(found, 28)) <= {"none", "keep-products"}


@pytest.mark.parametrize(("schedule", "dp"), [("1f1b", 1), ("zero-bubble", 1), ("zero-bubble-v", 1), ("auto", 2)])
def test_what_is_found_fits_and_is_faster_than_one_level(sample: Sample, schedule: str, dp: int) -> None:
    config = replace(SMALL, schedule=schedule, dp=dp, virtual_stages=2 if schedule == "zero-bubble-v" else 1)
    of_levels = [try_out(sample, config, replace(COST, checkpointing=level)) for level in CHECKPOINTINGS]
    totals = [outcome.memory(outcome.cost).total for outcome in of_levels]
    gpu_memory = (max(totals[:1]) + min(totals)) // 2
    found = fastest_fitting(sample, config, COST, gpu_memory)
    outcome = try_out(sample, config, found)
    assert outcome.memory(found).total <= gpu_memory
    fastest = min(each.step_ns for each, total in zip(of_levels, totals, strict=True) if total <= gpu_memory)
    assert outcome.step_ns <= fastest


#: Six layers on two stages, and the moments of these.
TINY = PlanConfig(chunk_size=8192, k=4, global_batch=64, pp=2, schedule="1f1b")
TINY_COST = CostModel(shape=replace(COST.shape, order=COST.shape.order[:6]))
MIXTURES = [",".join(f"{level}:1" for level in reversed(of)) for of in combinations_with_replacement(CHECKPOINTINGS, 3)]


def drawn_moments(all_kinds: bool) -> st.SearchStrategy[np.ndarray]:
    """Up to three moments [n, 2, 8], in tokens; where not `all_kinds`, none between halves of a backward or in a last
    layer."""
    tokens = st.integers(0, 300_000)
    more = tokens if all_kinds else st.just(0)
    kv = tokens.flatmap(lambda most: st.tuples(st.just(most), st.integers(0, most)))
    kinds = st.tuples(tokens, tokens, kv, more, more).map(
        lambda drawn: (drawn[0], drawn[1], drawn[2][0], drawn[3], 0, 0, drawn[4], drawn[2][1])
    )
    held = st.lists(kinds, min_size=2, max_size=2)
    return st.lists(held, min_size=1, max_size=3).map(lambda rows: np.array(rows, np.int64))


def again_ns(found: str, sample: Sample) -> float:
    """What the layers of `TINY_COST` run again in a step."""
    tokens, pairs = sample.tokens_per_step, sample.attention_pairs_per_step(TINY_COST)
    agains = [replace(TINY_COST, checkpointing=level).rates.again for level in levels_of(found, 6)]
    return sum(each.token * tokens + each.pair * pairs + each.chunk * tokens / TINY.chunk_size for each in agains)


def totals_of(found: str, moments: np.ndarray) -> np.ndarray:
    """Memory of each stage at its fullest moment, [2]."""
    cost = replace(TINY_COST, checkpointing=found)
    return np.max([[stage.total for stage in memory_of_stages(TINY, cost, moment)] for moment in moments], axis=0)


@settings(deadline=None, max_examples=40)
@given(moments=drawn_moments(all_kinds=False), gpu_memory=st.integers(20 * GIB, 300 * GIB))
@example(moments=np.array([[(266_041, *[0] * 7), [0] * 8]]), gpu_memory=59_607_686_171)
def test_no_mixture_that_fits_runs_less_again(sample: Sample, moments: np.ndarray, gpu_memory: int) -> None:
    """Of all 56 of the three layers of each of two stages.

    The program leaves room for the backward of a layer of any level, so what it finds is at least as good as all that
    fit with so much less room, and no better than all that fit.
    """
    layer = TINY_COST.shape.kinds[0]
    working = [working_bytes_per_token(TINY_COST, layer, level) for level in CHECKPOINTINGS]
    spare = int(TINY.chunk_size * (max(working) - min(working))) + 10

    def least_ns(stage: int, mixtures: Sequence[str], most: int) -> float | None:
        fitting = [
            again_ns(f"{levels},{levels}", sample) / 2
            for levels in mixtures
            if totals_of(f"{levels},{levels}", moments)[stage] <= most
        ]
        return min(fitting, default=None)

    found = mixture(TINY, TINY_COST, moments, gpu_memory, sample)
    if found is None:
        assert None in [least_ns(stage, MIXTURES, gpu_memory - spare) for stage in range(2)]
        return
    for stage in range(2):
        own = levels_of(found, 6)[3 * stage : 3 * stage + 3]
        own_ns = again_ns(",".join(f"{level}:1" for level in (*own, *own)), sample) / 2
        below, above = (least_ns(stage, MIXTURES, most) for most in (gpu_memory, gpu_memory - spare))
        assert below is not None and below <= own_ns * (1 + 1e-6) + 10
        assert above is None or own_ns <= above * (1 + 1e-6) + 10


@settings(deadline=None, max_examples=60)
@given(
    moments=drawn_moments(all_kinds=True),
    gpu_memory=st.lists(st.integers(20 * GIB, 500 * GIB), min_size=2, max_size=2).map(sorted),
)
@example(moments=np.array([[[0] * 8, [242_812, *[0] * 7]]]), gpu_memory=[200_572_029_336] * 2)
def test_every_stage_fits_and_more_memory_never_runs_more_again(
    sample: Sample, moments: np.ndarray, gpu_memory: list[int]
) -> None:
    less, more = (mixture(TINY, TINY_COST, moments, most, sample) for most in gpu_memory)
    for found, most in zip((less, more), gpu_memory, strict=True):
        assert found is None or (totals_of(found, moments) <= most).all()
    if less is not None:
        assert more is not None
        assert again_ns(more, sample) <= again_ns(less, sample) * (1 + 1e-6) + 10


def test_where_a_mixture_gains_nothing_there_is_one_level_and_no_runs(sample: Sample) -> None:
    config = replace(SMALL, pp=1, schedule="algorithm2")
    totals = [
        outcome.memory(outcome.cost).total
        for outcome in (try_out(sample, config, replace(COST, checkpointing=level)) for level in CHECKPOINTINGS)
    ]
    for level, gpu_memory in (("none", totals[0]), ("offload", totals[-1]), ("offload", totals[-1] // 2)):
        assert fastest_fitting(sample, config, COST, gpu_memory).checkpointing == level


def test_inputs_on_the_host_make_room_for_levels_that_run_less_again(sample: Sample) -> None:
    """Where `full` just fits: of the same layers, some then hold nothing and others hold attention's output."""
    config = replace(SMALL, pp=1, schedule="algorithm2")
    full = try_out(sample, config, replace(COST, checkpointing="full"))
    gpu_memory = full.memory(full.cost).total
    found = fastest_fitting(sample, config, COST, gpu_memory)
    assert "offload" in found.levels
    outcome = try_out(sample, config, found)
    assert outcome.step_ns < full.step_ns and outcome.memory(found).total <= gpu_memory


def test_where_no_layer_needs_full_none_has_its_input_on_the_host(sample: Sample) -> None:
    """The room for inputs on their way is not taken then: the levels are those that there were without."""
    for gib in (400, 80):
        found = mixture(SMALL, COST, moments_of(sample, SMALL, COST), gib * GIB, sample)
        assert found is not None and "full" not in found and "offload" not in found


def test_what_cannot_be_faster_is_not_tried(sample: Sample) -> None:
    options = options_with(tp=1, pp=4, dp=1, gpu_memory=62 * GIB)
    tried = [try_out(sample, SMALL, replace(COST, checkpointing=level)) for level in CHECKPOINTINGS]
    assert mixed_outcomes(sample, options, tried, 0.0) == []
    found = mixed_outcomes(sample, options, tried, math.inf)
    assert found and all(each.memory(each.cost).total <= 62 * GIB for each in found)


@pytest.fixture(scope="module")
def mixed(lengths: Path) -> Tuning:
    return tune(lengths, options_with(tp=1, pp=4, dp=1, gpu_memory=62 * GIB))


def test_tune_takes_a_mixture_where_it_is_faster(lengths: Path, mixed: Tuning) -> None:
    levels = mixed.best.cost.levels
    assert len(set(levels)) > 1
    assert mixed.best.fits and mixed.best.memory.total <= 62 * GIB
    uniform = [each for each in mixed.choices if each.fits and len(set(each.cost.levels)) == 1]
    assert all(mixed.best.step_ns < each.step_ns for each in uniform)


def test_the_document_the_plan_and_the_manifest_have_the_mixture(lengths: Path, mixed: Tuning, tmp_path: Path) -> None:
    write_tuning(mixed, tmp_path / "tune.json")
    assert read_tuning(tmp_path / "tune.json") == tuned(mixed)
    assert answers(read_tuning_document(tmp_path / "tune.json"), mixed.options, ("shape", "hardware", "lora_rank"))
    found = read_tuning(tmp_path / "tune.json")
    plan = chunkplan.build(lengths, tmp_path / "plan", found.config, cost=found.cost)
    assert plan.cost.checkpointing == mixed.best.cost.checkpointing
    entries = json.loads((tmp_path / "plan" / "manifest.json").read_text())["predictions"]["cost_model"]
    assert entries["checkpointing"] == mixed.best.cost.checkpointing


def test_where_memory_is_no_limit_no_layer_runs_again(lengths: Path, tuning: Tuning) -> None:
    wide = tune(lengths, replace(tuning.options, gpu_memory=1000 * GIB))
    assert {each.cost.checkpointing for each in wide.choices} == {"none"}
