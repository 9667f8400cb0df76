"""The choice of ChunkSize and K: what it is made from, that it is the best there is, and that it is kept."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chunkplan
from chunkplan.config.plan import SCHEDULES, PlanConfig
from chunkplan.cost.checkpointing import CHECKPOINTINGS
from chunkplan.cost.model import CostModel, Sharding
from chunkplan.cost.model_config import shape_of_config
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan.errors import UsageError
from chunkplan.tuning.baselines import baselines
from chunkplan.tuning.document import tuning_document, write_tuning
from chunkplan.tuning.options import LADDER, GpuLayout
from chunkplan.tuning.sampling import sample_steps
from chunkplan.tuning.trial import try_out, why_plan_only
from chunkplan.tuning.tune import Tuning, tune
from chunkplan_runtime.feed.stream import check_runnable
from tests.support.places import ROOT
from tests.support.plain import PLAIN
from tests.support.published_models import MODELS
from tests.support.tuning_cases import GIB, long_tail, options_with

# sampling


@pytest.mark.soak
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
        if outcome.memory(cost).total <= options.gpu_memory:
            times[chunk_size, k, memory] = outcome.step_ns
    chosen = try_out(everything, tuning.chosen.config, tuning.chosen.cost)
    assert chosen.step_ns <= 1.03 * min(times.values())
    assert chosen.memory(tuning.chosen.cost).total <= options.gpu_memory


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


@pytest.mark.soak
def test_what_the_runtime_cannot_run_is_marked_and_never_recommended(lengths: Path, tuning: Tuning) -> None:
    assert tuning.recommended is None
    assert {choice.plan_only for choice in tuning.choices} == {"tensor parallelism"}
    for pp in (1, 2):
        found = tune(lengths, options_with(tp=1, dp=2, pp=pp, gpu_memory=400 * GIB, schedules=None))
        assert found.recommended is not None and found.best is found.recommended
        assert {choice.plan_only for choice in found.choices} == {None}
        runnable = [choice for choice in found.choices if choice.fits and choice.plan_only is None]
        assert found.recommended.step_ns <= 1.005 * runnable[0].step_ns
        assert all(found.choices[place].plan_only is None for place in found.pareto)
    assert (found.chosen.config.schedule, found.best.config.schedule) == ("zero-bubble-v", "zero-bubble-v")


def test_a_long_sequence_on_a_pipeline_is_cut_into_parts_of_equal_time(tmp_path: Path, command: Any) -> None:
    """It is faster so, is written, and is what `build --auto` builds unless it is told otherwise."""
    np.save(tmp_path / "long.npy", np.array([400_000] * 4))
    found = tune(
        tmp_path / "long.npy",
        options_with(
            tp=1, pp=8, global_batch=1, ks=(1,), chunk_sizes=(16384,), gpu_memory=400 * GIB, cp="off", hardware=PLAIN
        ),
    )
    schedule = found.best.config.schedule
    by_split = {each.config.split: each for each in reversed(found.choices) if each.config.schedule == schedule}
    assert by_split["cost"].step_ns < 0.97 * by_split["full"].step_ns
    assert found.best.config.split == "cost"
    write_tuning(found, tmp_path / "tune.json")
    for given, split in (((), "cost"), (("--split", "even"), "even")):
        place = tmp_path / split
        ran = command(
            "build", tmp_path / "long.npy", "--auto", "--from", tmp_path / "tune.json", "--output", place, *given
        )
        assert ran.code == 0 and ("parts of equal time" in ran.err) == (split == "cost")
        plan = chunkplan.load_plan(place)
        assert plan.config.split == split
    assert found.best.step_ns / 1e3 == pytest.approx(
        chunkplan.load_plan(tmp_path / "cost").steps().column("predicted_us").to_numpy().mean(), rel=1e-3
    )


def test_on_one_stage_parts_of_equal_time_are_not_tried(tmp_path: Path) -> None:
    np.save(tmp_path / "long.npy", np.array([400_000] * 4))
    found = tune(
        tmp_path / "long.npy",
        options_with(tp=1, pp=1, schedules=None, global_batch=1, ks=(1,), chunk_sizes=(16384,), gpu_memory=400 * GIB),
    )
    assert {choice.config.split for choice in found.choices} == {"full"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_can_be_run(schedule: str, lengths: Path, tmp_path: Path) -> None:
    config = PlanConfig(
        chunk_size=16384, k=1, global_batch=8, pp=1 if schedule == "algorithm2" else 2, schedule=schedule
    )
    np.save(tmp_path / "few.npy", np.load(lengths)[:8])
    check_runnable(chunkplan.build(tmp_path / "few.npy", tmp_path / "plan", config))
    assert why_plan_only(config, CostModel()) is None


@pytest.mark.parametrize(
    ("sharding", "changes"),
    [
        ("none", {}),
        ("optimizer", {"pp": 2}),
        ("optimizer", {"cp": "auto"}),
        ("gradients", {}),
        ("gradients", {"pp": 2, "schedule": "zero-bubble"}),
        ("weights", {"cp": "auto"}),
        ("weights", {"k": 2}),
        ("weights", {"k_by_length": ((5000, 2),)}),
        ("weights", {"pp": 2}),
    ],
)
def test_whatever_is_sharded_the_runtime_can_run(sharding: Sharding, changes: dict[str, Any]) -> None:
    """But of a recurrent model gradients and weights cannot be, where there is more than one rank."""
    config = PlanConfig(**({"chunk_size": 1024, "k": 1, "dp": 2} | changes))
    assert why_plan_only(config, CostModel(sharding=sharding)) is None
    recurrent = CostModel(shape=shape_of_config(MODELS["OLMo-Hybrid-7B"].config, ""), sharding=sharding)
    expected = f"sharded {sharding} of a recurrent model" if sharding in ("gradients", "weights") else None
    found = why_plan_only(replace(config, cp="off"), recurrent)
    assert found == expected
    assert "sharded" not in str(why_plan_only(replace(config, dp=1), recurrent))


def test_ranks_that_share_weights_may_have_any_k_and_any_counts_of_chunks(lengths: Path) -> None:
    found = tune(lengths, options_with(tp=1, dp=4, pp=1, gpu_memory=400 * GIB, sharding="weights", schedules=None))
    assert found.recommended is found.chosen
    assert {choice.plan_only for choice in found.choices} == {None}
    assert len({choice.config.k for choice in found.choices}) > 1
    assert not any(choice.config.equal_chunks for choice in found.choices)


@pytest.mark.soak
def test_less_memory_means_checkpointing_then_nothing(lengths: Path) -> None:
    """What does not fit as it is, is tried with less; where nothing fits, what would is said."""
    needed = min(choice.memory.total for choice in tune(lengths, options_with()).choices)
    tight = tune(lengths, options_with(gpu_memory=needed - GIB))
    assert tight.chosen.cost.checkpointing == "full" or tight.chosen.cost.kv_offload
    assert tight.chosen.memory.total <= needed - GIB
    with pytest.raises(UsageError, match=r"nothing fits 8\.0 GiB a GPU .*: the least is [\d.]+ GiB") as error:
        tune(lengths, options_with(gpu_memory=8 * GIB))
    assert "--dp" in error.value.hint and "--sharding" not in error.value.hint
    with pytest.raises(UsageError) as error:
        tune(lengths, options_with(gpu_memory=8 * GIB, sharding="none"))
    assert "--sharding auto" in error.value.hint


@pytest.mark.soak
def test_longer_sequences_get_a_smaller_k_where_their_keys_and_values_take_the_room(tmp_path: Path) -> None:
    """One K for all would have to be that of the longest; the plan that follows keeps every invariant."""
    tokens = np.concatenate([np.full(1500, 40_000, np.int32), np.full(2, 900_000, np.int32)])
    np.save(tmp_path / "lengths.npy", tokens)
    given = {
        "global_batch": 16,
        "chunk_sizes": (1024,),
        "ks": (1, 2, 4, 8, 16),
        "tp": 4,
        "pp": 1,
        "schedules": None,
        "hardware": PLAIN,
    }
    wide = options_with(**given, gpu_memory=1000 * GIB)
    layout, cost = GpuLayout(1, 4, 1), wide.cost(GpuLayout(1, 4, 1), LADDER[0])
    sample = sample_steps(tokens, wide.plan_config(layout, 1024, 1, "algorithm2"), cost, 48)
    some, many = (try_out(sample, wide.plan_config(layout, 1024, k, "algorithm2"), cost) for k in (4, 16))
    enough = some.memory(cost).total
    assert max(stage.total for stage in many.stages(cost, sample.classes[0].step)) < enough
    found = tune(tmp_path / "lengths.npy", options_with(**given, gpu_memory=enough))
    by_length = found.choices[0].config
    assert by_length.k_by_length is not None
    assert by_length.k > by_length.k_by_length[-1][1]
    plan = chunkplan.build(tmp_path / "lengths.npy", tmp_path / "plan", by_length)
    assert chunkplan.validate(plan.path).ok


@pytest.mark.soak
def test_gpus_are_laid_out_whole_and_of_the_fastest_layouts_one_can_be_run(lengths: Path) -> None:
    """Layers are shared by none, as the runtime cannot run that."""
    found = tune(lengths, options_with(gpus=8, tp=1, pp=1, chunk_sizes=(2048, 8192), ks=(1, 4)))
    assert {look.layout.gpus for look in found.layouts} == {8}
    assert {look.layout.tp for look in found.layouts} == {1}
    assert found.chosen.layout.gpus == 8
    times = [look.step_ns for look in found.layouts if look.step_ns is not None]
    assert times == sorted(times)
    assert found.chosen.layout in [look.layout for look in found.layouts[:2]]
    runnable = [look for look in found.layouts if look.runnable_ns is not None]
    assert found.recommended is not None and found.recommended.plan_only is None
    assert found.recommended.layout in [look.layout for look in runnable]


@pytest.mark.soak
def test_layers_are_shared_where_that_is_asked_for_which_is_plan_only(lengths: Path) -> None:
    found = tune(lengths, options_with(gpus=8, tp=2, pp=1, chunk_sizes=(8192,), ks=(1, 4)))
    assert {look.layout.tp for look in found.layouts} == {2}
    assert found.recommended is None and found.chosen.plan_only == "tensor parallelism"
    assert all(look.runnable_ns is None for look in found.layouts)


def test_adapters_fit_where_all_weights_do_not(lengths: Path) -> None:
    """A 7B on one GPU of 80 GiB, and on weights in 4 bits on one of 24."""
    one = {"tp": 1, "pp": 1, "schedules": None, "chunk_sizes": (2048,), "ks": (1,)}
    with pytest.raises(UsageError, match=r"nothing fits 80\.0 GiB") as raised:
        tune(lengths, options_with(**one))
    assert "adapters (--lora-rank)" in str(raised.value.hint)
    assert "adamw-8bit" not in str(raised.value.hint), "the states of a 7B alone take 85 GiB with it"
    with pytest.raises(UsageError) as raised:
        tune(lengths, options_with(**one, gpu_memory=100 * GIB))
    assert ", --optimizer adamw-8bit" in str(raised.value.hint)
    assert tune(lengths, options_with(**one, gpu_memory=100 * GIB, optimizer="adamw-8bit")).recommended is not None
    found = tune(lengths, options_with(**one, lora_rank=16))
    assert found.recommended is not None and found.recommended.cost.lora_rank == 16
    with pytest.raises(UsageError, match=r"nothing fits 16\.0 GiB") as raised:
        tune(lengths, options_with(**one, lora_rank=16, gpu_memory=16 * GIB))
    assert "--load-in-4bit" in str(raised.value.hint)
    small = tune(lengths, options_with(**one, lora_rank=16, load_in_4bit=True, gpu_memory=24 * GIB))
    assert small.recommended is not None
    assert CostModel.from_dict(tuning_document(small)["cost_model"], where="a test") == small.best.cost


@pytest.mark.soak
@pytest.mark.parametrize(("optimizer", "precision"), [("sgd", "fp32"), ("adafactor", "bf16")])
def test_an_optimizer_that_keeps_nothing_of_a_weight_is_not_to_be_made_smaller(
    lengths: Path, optimizer: str, precision: str
) -> None:
    given = {"tp": 1, "pp": 1, "schedules": None, "gpu_memory": 8 * GIB}
    with pytest.raises(UsageError) as raised:
        tune(lengths, options_with(**given, optimizer=optimizer, precision=precision))
    assert "adamw-8bit" not in str(raised.value.hint)


def test_the_same_data_and_options_make_the_same_document(lengths: Path) -> None:
    one, other = (tuning_document(tune(lengths, options_with(chunk_sizes=(8192,), ks=(1, 4)))) for _ in range(2))
    assert one == other


# the baselines


def test_baselines_differ_in_what_they_compute(lengths: Path, tuning: Tuning) -> None:
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


@pytest.mark.soak
def test_context_and_tensor_parallelism_are_baselines_of_their_own_each_on_its_best_layout(lengths: Path) -> None:
    found = tune(lengths, options_with(gpus=4, tp=1, pp=1, chunk_sizes=(4096,), ks=(1,)))
    rows = {row.key: row for row in found.baselines}
    packed, tensor, context = (rows[key] for key in ("packed", "megatron", "context-parallel"))
    assert packed.layout.tp == packed.cp == context.layout.tp == 1 < min(tensor.layout.tp, context.cp)
    assert {row.lost for row in (packed, tensor, context)} == {0.0}


def test_baselines_share_weights_too_where_that_spares_recomputing(tmp_path: Path) -> None:
    """Nothing is split, packed or balanced here, so there is nothing to gain: whatever a choice may share, they may."""
    np.save(tmp_path / "equal.npy", np.full(256, 8192, np.int32))
    options = options_with(tp=1, dp=8, pp=1, schedules=None, global_batch=64, chunk_sizes=(8192,), ks=(1,))
    found = tune(tmp_path / "equal.npy", options)
    assert found.best_baseline is not None and found.best_baseline.sharding == "weights"
    assert found.best.cost.checkpointing == found.best_baseline.checkpointing == "none"
    assert found.gain == pytest.approx(1, abs=0.01)


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


@pytest.mark.soak
def test_a_choice_whose_memory_does_not_hold_on_the_heaviest_steps_is_passed_over(lengths: Path) -> None:
    """For every budget: what is chosen fits on all steps, not on sampled ones alone."""
    for gib in (16, 20, 24, 32):
        options = options_with(gpu_memory=gib * GIB, pp=4, schedules=("zero-bubble",), ks=(1, 4))
        chosen = tune(lengths, options).chosen
        everything = sample_steps(np.load(lengths), chosen.config, chosen.cost, 10**6)
        assert try_out(everything, chosen.config, chosen.cost).memory(chosen.cost).total <= gib * GIB


@pytest.mark.soak
def test_sixteen_ranks_take_more_than_a_sixteenth_and_hold_less(lengths: Path) -> None:
    """Summing gradients costs time on several ranks, whatever they shard; with sharded weights each holds least."""
    alone, shared, sharded = (
        tune(lengths, options_with(**changes, tp=4, pp=1, schedules=None, chunk_sizes=(1024,), ks=(1,))).choices[0]
        for changes in ({}, {"dp": 16, "sharding": "optimizer"}, {"dp": 16, "sharding": "weights"})
    )
    assert min(shared.step_ns, sharded.step_ns) > alone.step_ns / 16
    assert sharded.memory.total < shared.memory.total < alone.memory.total


@pytest.mark.parametrize(("gpu_memory", "checkpointing"), [(400, "none"), (55, "keep-attention")])
def test_a_mixture_of_experts_on_one_gpu_is_recommended(lengths: Path, gpu_memory: int, checkpointing: str) -> None:
    """With little memory as well: the runtime recomputes layers where the plan's times say so."""
    experts = replace(QWEN2_5_7B.kinds[0], all_mlp_width=4 * 18944, experts_per_token=1)
    mixture = replace(QWEN2_5_7B.first(2), name="mixture", kinds=(experts,))
    found = tune(lengths, options_with(shape=mixture, tp=1, pp=1, gpu_memory=gpu_memory * GIB, schedules=None))
    assert found.recommended is not None
    assert found.recommended.plan_only is None
    assert {choice.cost.checkpointing for choice in found.choices if choice.fits} >= {checkpointing}


def tuned_on_four(name: str, folder: Path, cp: str) -> Tuning:
    """For a published model on four ranks, with a sequence as long as they come."""
    np.save(folder / "lengths.npy", long_tail(3000, longest=262_144))
    options = options_with(
        shape=shape_of_config(MODELS[name].config, ""),
        dp=4,
        tp=1,
        pp=1,
        schedules=None,
        gpu_memory=140 * GIB,
        chunk_sizes=(2048, 8192),
        cp=cp,
        hardware=PLAIN,
    )
    return tune(folder / "lengths.npy", options)


@pytest.mark.soak
def test_a_recurrent_model_has_another_plan_than_one_whose_attention_sees_everything(tmp_path: Path) -> None:
    """Two models of 7B, of which the keys of the one fill the memory and not those of the other.

    So the one has to share more and to run more again.
    """
    quadratic, recurrent = (
        tuned_on_four(name, tmp_path, "off").recommended for name in ("OLMo-2-7B", "OLMo-Hybrid-7B")
    )
    assert quadratic is not None
    assert recurrent is not None
    kept = [each.memory.kv + each.memory.kv_gradients for each in (quadratic, recurrent)]
    assert kept[0] > 3.9 * kept[1]  # one layer in four has keys; what a page at work takes is as much for both
    assert [each.cost.sharding for each in (quadratic, recurrent)] == ["weights", "optimizer"]
    again = [
        sum(map(CHECKPOINTINGS.index, each.cost.levels)) / len(each.cost.levels) for each in (quadratic, recurrent)
    ]
    assert again[0] > again[1] > 0
    assert quadratic.step_ns > 1.15 * recurrent.step_ns


def test_a_recurrent_model_is_recommended_what_the_runtime_can_run_of_it(tmp_path: Path) -> None:
    """It cannot pass states between ranks, nor shard gradients of layers that keep one; it recomputes them."""
    found = tuned_on_four("OLMo-Hybrid-7B", tmp_path, "auto")
    assert (found.chosen.config.cp, found.chosen.plan_only) == ("auto", "shared sequences of a recurrent model")
    assert found.recommended is not None
    assert found.recommended.config.cp == "off"
    others = {choice.plan_only for choice in found.choices if choice.cost.checkpointing != "none"}
    assert others
    assert None in others
    assert all(each is None or "of a recurrent model" in each for each in others)


def test_one_sequence_a_micro_batch_is_a_plan_that_splits_and_packs_nothing(tmp_path: Path) -> None:
    """Where every sequence fills a chunk, plain 1F1B and the plan are the same."""
    tokens = np.full(32, 8192, np.int32)
    options = options_with(global_batch=8)
    layout = GpuLayout(1, 4, 2)
    config = options.plan_config(layout, 8192, 1, "1f1b")
    sample = sample_steps(tokens, config, options.cost(layout, LADDER[0]), 100)
    first = next(iter(baselines(sample, options, [layout], lambda *done: None)))
    assert first.step_ns == pytest.approx(try_out(sample, config, options.cost(layout, LADDER[0])).step_ns)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 7, "tp": 1}, "exclude each other"),
        ({"gpus": 7, "tp": 2, "pp": 1}, "7 GPUs cannot be used whole with tp 2"),
        ({"chunk_sizes": ()}, "chunk-sizes"),
        ({"ks": (0,)}, "ks is"),
        ({"dp": 0}, "dp is 0"),
        ({"schedules": ("fastest",)}, "schedules is fastest"),
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
from chunkplan.tuning.tune import tune
from tests.support.tuning_cases import options_with
signal.signal(signal.SIGINT, signal.default_int_handler)
tune(Path({str(lengths)!r}), options_with(chunk_sizes=(8192,), ks=(1, 4)))
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr
