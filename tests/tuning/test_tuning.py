"""The choice of ChunkSize and K: what it is made from, that it is the best there is, and that it is kept."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chunkplan
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.model import CostModel, Sharding
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan.errors import DataError, UsageError
from chunkplan.schedule.families import SCHEDULES
from chunkplan.tuning.baselines import baselines
from chunkplan.tuning.document import read_tuning, tuned, tuning_document, write_tuning
from chunkplan.tuning.drift import find_drift
from chunkplan.tuning.options import LADDER, GpuLayout, TuneOptions
from chunkplan.tuning.plan_only import why_plan_only
from chunkplan.tuning.program import Candidate, choose
from chunkplan.tuning.sampling import sample_steps
from chunkplan.tuning.trial import try_out
from chunkplan.tuning.tune import Tuning, tune
from tests.support.places import ROOT

GIB = 1 << 30


def long_tail(count: int, longest: int = 200_000, seed: int = 0) -> np.ndarray:
    """Many short sequences, few long ones."""
    tokens = np.random.default_rng(seed).lognormal(6.3, 1.5, count).astype(np.int32)
    return np.clip(tokens, 1, longest)


def options_with(**changes: Any) -> TuneOptions:
    given: dict[str, Any] = {
        "shape": QWEN2_5_7B,
        "hardware": load_hardware("h100"),
        "gpu_memory": 80 * GIB,
        "tp": 4,
        "pp": 2,
        "global_batch": 64,
        "chunk_sizes": (2048, 8192, 32768),
        "ks": (1, 4, 16),
        "schedules": ("1f1b",),
    }
    return TuneOptions(**(given | changes))


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "lengths.npy"
    np.save(path, long_tail(12_000))
    return path


@pytest.fixture(scope="module")
def tuning(lengths: Path) -> Tuning:
    return tune(lengths, options_with())


# sampling


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
    for pp, schedule in ((1, "algorithm2"), (2, "1f1b"), (2, "zero-bubble"), (2, "interleaved")):
        config = PlanConfig(chunk_size=4096, k=2, global_batch=64, dp=2, pp=pp, schedule=schedule, seed=3)
        sample = sample_steps(np.load(few), config, CostModel(), 10**6)
        outcome = try_out(sample, config, CostModel())
        plan = chunkplan.build(few, tmp_path / f"{schedule}{pp}", config)
        predicted = plan.steps().column("predicted_us").to_numpy()
        assert outcome.step_ns / 1e3 == pytest.approx(predicted.mean(), rel=1e-5)
        retained = plan.steps().column("peak_retained_tokens").to_numpy()
        assert outcome.moments[1, :, :, 0].max() <= retained.max() * (config.virtual_stages or 1)


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


# the integer program


@settings(max_examples=60)
@given(st.data())
def test_the_program_finds_what_trying_everything_finds(data: st.DataObject) -> None:
    """One candidate, one K for each length class, none larger for longer ones, the least time within the memory."""
    num_classes, num_ks, num_stages = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3)), 2
    candidates = []
    for family in range(data.draw(st.integers(1, 3))):
        extra = [
            sorted(data.draw(st.lists(st.integers(0, 50), min_size=num_ks, max_size=num_ks)), reverse=True)
            for _ in range(num_classes)
        ]
        memory = [
            [[data.draw(st.integers(1, 9)) + place for _ in range(num_stages)] for place in range(num_ks)]
            for _ in range(num_classes)
        ]
        candidates.append(
            Candidate(
                family=family,
                rung=0,
                base_ns=1000.0 * data.draw(st.integers(1, 60)),
                extra_ns=tuple(tuple(1000.0 * value for value in row) for row in extra),
                stage_bytes=tuple(tuple(tuple(stages) for stages in row) for row in memory),
            )
        )
    budget = data.draw(st.integers(1, 11))
    best = {}
    for place, candidate in enumerate(candidates):
        for ks in product(range(num_ks), repeat=num_classes):
            fits = all(max(candidate.stage_bytes[c][k]) <= budget for c, k in enumerate(ks))
            if fits and all(before >= after for before, after in pairwise(ks)):
                time = candidate.base_ns + sum(candidate.extra_ns[c][k] for c, k in enumerate(ks))
                best[place] = min(time, best.get(place, time))
    found = choose(candidates, budget, len(candidates))
    times = [
        candidates[place].base_ns + sum(candidates[place].extra_ns[c][k] for c, k in enumerate(ks))
        for place, ks in found
    ]
    assert times == sorted(best.values())


# the choice


def test_the_choice_is_within_3_percent_of_the_best_of_all_steps_simulated(lengths: Path, tuning: Tuning) -> None:
    """Against every (ChunkSize, K) tried on all steps."""
    options = tuning.options
    layout = GpuLayout(1, 4, 2)
    everything = sample_steps(
        np.load(lengths), options.plan_config(layout, 8192, 4, "1f1b"), options.cost(layout, LADDER[0]), 10**6
    )
    times = {}
    for chunk_size, k, memory in product(options.chunk_sizes, options.ks, LADDER[::2]):
        cost = options.cost(layout, memory)
        outcome = try_out(everything, options.plan_config(layout, chunk_size, k, "1f1b"), cost)
        if outcome.memory(cost, options.sharding).total <= options.gpu_memory:
            times[chunk_size, k, memory] = outcome.step_ns
    chosen = try_out(everything, tuning.chosen.config, tuning.chosen.cost)
    assert chosen.step_ns <= 1.03 * min(times.values())
    assert chosen.memory(tuning.chosen.cost, options.sharding).total <= options.gpu_memory


def test_the_front_is_what_nothing_beats_in_time_and_memory(tuning: Tuning) -> None:
    fitting = [choice for choice in tuning.choices if choice.fits]
    front = [tuning.choices[place] for place in tuning.pareto]
    for choice in fitting:
        beaten = any(
            (other.step_ns <= choice.step_ns and other.memory.total < choice.memory.total)
            or (other.step_ns < choice.step_ns and other.memory.total <= choice.memory.total)
            for other in fitting
        )
        assert not (beaten and choice in front)
    assert [choice.step_ns for choice in fitting] == sorted(choice.step_ns for choice in fitting)


def test_what_the_runtime_cannot_run_is_marked_and_never_recommended(lengths: Path, tuning: Tuning) -> None:
    assert tuning.recommended is None
    assert {choice.plan_only for choice in tuning.choices} == {"tensor parallelism"}
    for pp in (1, 2):
        found = tune(lengths, options_with(tp=1, dp=2, pp=pp, gpu_memory=400 * GIB, schedules=None))
        assert found.recommended is not None and found.best is found.recommended
        assert {choice.plan_only for choice in found.choices} == ({None} if pp == 1 else {None, "split backwards"})
        runnable = [choice for choice in found.choices if choice.fits and choice.plan_only is None]
        assert found.recommended.step_ns <= 1.005 * runnable[0].step_ns
        assert all(found.choices[place].plan_only is None for place in found.pareto)
    assert (found.chosen.config.schedule, found.best.config.schedule) == ("zero-bubble", "1f1b")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_plan_only_is_every_schedule_with_more_than_one_model_part_a_stage_or_split_backwards(
    schedule: str, lengths: Path, tmp_path: Path
) -> None:
    config = PlanConfig(
        chunk_size=16384, k=1, global_batch=8, pp=1 if schedule == "algorithm2" else 2, schedule=schedule
    )
    np.save(tmp_path / "few.npy", np.load(lengths)[:8])
    plan = chunkplan.build(tmp_path / "few.npy", tmp_path / "plan", config)
    actions = [action for step in plan.iter_steps() for of_stage in step.actions.values() for action in of_stage]
    is_interleaved = any(action.virtual_stage > 0 for action in actions)
    is_split = any(action.op == "backward_input" for action in actions)
    expected = "interleaved stages" if is_interleaved else "split backwards" if is_split else None
    assert why_plan_only(config, CostModel(), "optimizer") == expected


@pytest.mark.parametrize(
    ("sharding", "changes", "expected"),
    [
        ("none", {}, None),
        ("optimizer", {"pp": 2}, None),
        ("gradients", {}, "sharded gradients"),
        ("gradients", {"pp": 2, "schedule": "zero-bubble"}, "split backwards and sharded gradients"),
        ("weights", {"equal_chunks": True}, None),
        ("weights", {}, "sharded weights with unequal chunk counts"),
        ("weights", {"equal_chunks": True, "k": 2}, "sharded weights with K above 1"),
        ("weights", {"equal_chunks": True, "k_by_length": ((5000, 2),)}, "sharded weights with K above 1"),
        ("weights", {"equal_chunks": True, "pp": 2}, "sharded weights on a pipeline"),
    ],
)
def test_what_is_sharded_is_plan_only_where_the_runtime_cannot(
    sharding: Sharding, changes: dict[str, Any], expected: str | None
) -> None:
    """On one data-parallel rank there is nothing to shard."""
    config = PlanConfig(**({"chunk_size": 1024, "k": 1, "dp": 2} | changes))
    assert why_plan_only(config, CostModel(), sharding) == expected
    alone = str(why_plan_only(replace(config, dp=1), CostModel(), sharding))
    assert "sharded" not in alone


def test_ranks_that_share_weights_get_equal_chunks_and_k_1(lengths: Path) -> None:
    found = tune(lengths, options_with(tp=1, dp=4, pp=1, gpu_memory=400 * GIB, sharding="weights", schedules=None))
    assert found.recommended is not None
    assert (found.recommended.config.k, found.recommended.config.equal_chunks) == (1, True)
    assert tuned(found).config.equal_chunks


def test_less_memory_means_checkpointing_then_nothing(lengths: Path) -> None:
    """What does not fit as it is, is tried with less; where nothing fits, what would is said."""
    needed = min(choice.memory.total for choice in tune(lengths, options_with()).choices)
    tight = tune(lengths, options_with(gpu_memory=needed - GIB))
    assert tight.chosen.cost.checkpointing == "full" or tight.chosen.cost.kv_offload
    assert tight.chosen.memory.total <= needed - GIB
    with pytest.raises(UsageError, match=r"nothing fits 8\.0 GiB a GPU .*: the least is [\d.]+ GiB") as error:
        tune(lengths, options_with(gpu_memory=8 * GIB))
    assert "--sharding" in error.value.hint


def test_longer_sequences_get_a_smaller_k_where_their_keys_and_values_take_the_room(tmp_path: Path) -> None:
    """One K for all would have to be that of the longest; the plan that follows keeps every invariant."""
    tokens = np.concatenate([np.full(1500, 40_000, np.int32), np.full(2, 900_000, np.int32)])
    np.save(tmp_path / "lengths.npy", tokens)
    given = {"global_batch": 16, "chunk_sizes": (1024,), "ks": (1, 2, 4, 8, 16), "tp": 4, "pp": 1, "schedules": None}
    wide = options_with(**given, gpu_memory=1000 * GIB)
    layout, cost = GpuLayout(1, 4, 1), wide.cost(GpuLayout(1, 4, 1), LADDER[0])
    sample = sample_steps(tokens, wide.plan_config(layout, 1024, 1, "algorithm2"), cost, 48)
    some, many = (try_out(sample, wide.plan_config(layout, 1024, k, "algorithm2"), cost) for k in (4, 16))
    enough = some.memory(cost, "optimizer").total
    assert max(stage.total for stage in many.stages(cost, "optimizer", sample.classes[0].step)) < enough
    found = tune(tmp_path / "lengths.npy", options_with(**given, gpu_memory=enough))
    by_length = found.choices[0].config
    assert by_length.k_by_length is not None
    assert by_length.k > by_length.k_by_length[-1][1]
    plan = chunkplan.build(tmp_path / "lengths.npy", tmp_path / "plan", by_length)
    assert chunkplan.validate(plan.path).ok


def test_gpus_are_laid_out_whole_and_of_the_fastest_layouts_one_can_be_run(lengths: Path) -> None:
    """The two fastest ones share layers here: looked at as well is the fastest that the runtime can run."""
    found = tune(lengths, options_with(gpus=8, tp=1, pp=1))
    assert {look.layout.gpus for look in found.layouts} == {8}
    assert found.chosen.layout.gpus == 8
    times = [look.step_ns for look in found.layouts if look.step_ns is not None]
    assert times == sorted(times)
    assert found.chosen.layout in [look.layout for look in found.layouts[:2]]
    assert all(look.layout.tp > 1 and look.runnable_ns is None for look in found.layouts[:2])
    runnable = [look for look in found.layouts if look.runnable_ns is not None]
    assert found.recommended is not None
    assert found.recommended.layout == min(runnable, key=lambda look: look.runnable_ns or 0).layout
    assert {look.layout.tp for look in runnable} == {1}


def test_the_same_data_and_options_make_the_same_document(lengths: Path, tuning: Tuning) -> None:
    assert tuning_document(tune(lengths, options_with())) == tuning_document(tuning)


# what people run today


def test_ways_of_today_differ_in_what_they_compute(lengths: Path, tuning: Tuning) -> None:
    """Padding computes more than packing, cutting less; only cutting loses tokens; all beside the same data."""
    one, padded, packed, cut, *usual = tuning.baselines
    assert one.largest == packed.largest == np.load(lengths).max()
    assert padded.largest >= 2 * one.largest
    assert (one.lost, padded.lost, packed.lost) == (0, 0, 0)
    assert 0 < cut.lost < 1
    assert cut.largest < packed.largest
    assert tuning.chosen.step_ns < one.step_ns
    assert cut.step_ns <= packed.step_ns * 1.05
    assert all(row.largest < cut.largest and row.step_ns <= cut.step_ns and row.lost <= 0.03 for row in usual)
    whole = np.load(lengths).astype(np.int64)
    assert cut.lost == pytest.approx(np.maximum(whole - cut.largest, 0).sum() / whole.sum(), abs=0.02)


@pytest.mark.parametrize("tokens", [[1], [1, 1, 1], [700] * 40, [3000] * 500, [1_000_000]])
def test_data_of_any_kind_is_tuned(tmp_path: Path, tokens: list[int]) -> None:
    """Also where nothing is long enough to be split, or all there is is one sequence."""
    np.save(tmp_path / "lengths.npy", np.array(tokens, np.int32))
    found = tune(tmp_path / "lengths.npy", options_with(chunk_sizes=(256, 512, 4096, 65536)))
    assert found.chosen.fits
    assert [row.lost for row in found.baselines[:3]] == [0, 0, 0]


def test_chunks_larger_than_any_sequence_are_tried(tmp_path: Path) -> None:
    """They still save what every chunk costs beside its tokens: up to all that a rank has in a step."""
    np.save(tmp_path / "lengths.npy", np.full(512, 300, np.int32))
    found = tune(tmp_path / "lengths.npy", options_with(global_batch=64, tp=4, pp=1, schedules=None))
    assert {choice.config.chunk_size for choice in found.choices} == {2048, 8192, 32768}
    assert found.chosen.config.chunk_size > 2048


def test_a_choice_whose_memory_does_not_hold_on_the_heaviest_steps_is_passed_over(lengths: Path) -> None:
    """For every budget: what is chosen fits on all steps, not on sampled ones alone."""
    for gib in (16, 20, 24, 32):
        options = options_with(gpu_memory=gib * GIB, pp=4, schedules=("zero-bubble",))
        chosen = tune(lengths, options).chosen
        everything = sample_steps(np.load(lengths), chosen.config, chosen.cost, 10**6)
        assert try_out(everything, chosen.config, chosen.cost).memory(chosen.cost, "optimizer").total <= gib * GIB


def test_ranks_that_share_more_take_longer_and_hold_less(lengths: Path) -> None:
    """Summing gradients costs time on several ranks, and fetching sharded weights for chunks too small to hide it."""
    alone, shared, sharded = (
        tune(lengths, options_with(**changes, tp=4, pp=1, schedules=None, chunk_sizes=(1024,), ks=(1,))).choices[0]
        for changes in ({}, {"dp": 16}, {"dp": 16, "sharding": "weights"})
    )
    assert shared.step_ns > alone.step_ns / 16
    assert sharded.step_ns > shared.step_ns
    assert sharded.memory.total < shared.memory.total < alone.memory.total


@pytest.mark.parametrize(("gpu_memory", "checkpointing"), [(400, "none"), (53, "full")])
def test_a_mixture_of_experts_on_one_gpu_is_recommended(lengths: Path, gpu_memory: int, checkpointing: str) -> None:
    """With little memory as well: the runtime recomputes layers where the plan's times say so."""
    mixture = replace(QWEN2_5_7B, name="mixture", num_layers=2, all_mlp_width=4 * 18944, experts_per_token=1)
    found = tune(lengths, options_with(shape=mixture, tp=1, pp=1, gpu_memory=gpu_memory * GIB, schedules=None))
    assert found.recommended is not None
    assert found.recommended.plan_only is None
    assert {choice.cost.checkpointing for choice in found.choices if choice.fits} >= {checkpointing}


def test_one_sequence_a_micro_batch_is_a_plan_that_splits_and_packs_nothing(tmp_path: Path) -> None:
    """Where every sequence fills a chunk, plain 1F1B and the plan are the same."""
    tokens = np.full(32, 8192, np.int32)
    options = options_with(global_batch=8)
    layout = GpuLayout(1, 4, 2)
    config = options.plan_config(layout, 8192, 1, "1f1b")
    sample = sample_steps(tokens, config, options.cost(layout, LADDER[0]), 100)
    assert baselines(sample, options, layout)[0].step_ns == pytest.approx(
        try_out(sample, config, options.cost(layout, LADDER[0])).step_ns
    )


# the document


def test_what_is_written_is_read_again(tuning: Tuning, tmp_path: Path) -> None:
    write_tuning(tuning, tmp_path / "tune.json")
    assert read_tuning(tmp_path / "tune.json") == tuned(tuning)
    document = json.loads((tmp_path / "tune.json").read_text())
    assert document == json.loads(json.dumps(tuning_document(tuning)))
    assert list(tmp_path.iterdir()) == [tmp_path / "tune.json"]


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("chosen"),
        lambda document: document["chosen"].update(chunk_size=0),
        lambda document: document["chosen"].update(schedule="fastest"),
        lambda document: document["chosen"].update(k_by_length=[[5, 1], [5, 1]]),
        lambda document: document["data"].update(token_histogram={"x": 1}),
        lambda document: document["cost_model"].update(tp="four"),
        lambda document: document["options"].update(gpu_memory=10**400),
        lambda document: document.update(schema_version=2),
    ],
)
def test_a_damaged_document_is_refused_by_name(tuning: Tuning, tmp_path: Path, change: Any) -> None:
    document = json.loads(json.dumps(tuning_document(tuning)))
    change(document)
    (tmp_path / "tune.json").write_text(json.dumps(document))
    with pytest.raises(DataError) as error:
        read_tuning(tmp_path / "tune.json")
    assert str(tmp_path / "tune.json") in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"kind": "plan"}', "[" * 100_000])
def test_what_is_no_document_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tune.json").write_text(text)
    with pytest.raises(DataError):
        read_tuning(tmp_path / "tune.json")


def test_drift_is_the_share_of_tokens_that_changed_their_length_class(tuning: Tuning, lengths: Path) -> None:
    before = np.load(lengths)
    choice = tuned(tuning)
    config = choice.config
    same = find_drift(before, choice, config)
    assert same.moved == pytest.approx(0)
    assert same.fits
    assert not same.has_drifted
    shorter = find_drift(np.minimum(before, 1000).astype(np.int32), choice, config)
    assert shorter.has_drifted
    assert shorter.fits
    longer = find_drift(np.append(before, np.int32(40_000_000)).astype(np.int32), choice, config)
    assert longer.has_drifted
    assert not longer.fits
    assert longer.longest_now == 40_000_000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 7, "tp": 2}, "exclude each other"),
        ({"chunk_sizes": ()}, "chunk-sizes"),
        ({"ks": (0,)}, "ks is"),
        ({"dp": 0}, "dp is 0"),
        ({"schedules": ("fastest",)}, "schedules is \\('fastest',\\)"),
        ({"tp": 3}, "does not divide"),
        ({"pp": 1}, "schedules are for pipelines"),
        ({"pp": 29}, "28 layers"),
        ({"gpus": 100_003, "tp": 1, "pp": 1}, "cannot be used whole"),
    ],
)
def test_options_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        options_with(**changes)


def test_an_interrupt_after_tuning_is_still_pythons(lengths: Path) -> None:
    """The solver's own handler would be that of the process from then on, and end it on the spot."""
    program = f"""
import os, signal, time
from pathlib import Path
import tests.tuning.test_tuning as tuning
signal.signal(signal.SIGINT, signal.default_int_handler)
tuning.tune(Path({str(lengths)!r}), tuning.options_with(chunk_sizes=(8192,), ks=(1, 4)))
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr
