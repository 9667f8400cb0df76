"""The planner: every plan it makes keeps every invariant, and the same input makes the same plan."""

from __future__ import annotations

import subprocess
import sys
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
from chunkplan.cost.durations import durations, link_times
from chunkplan.cost.model import CostModel
from chunkplan.errors import DataError, UsageError
from chunkplan.operations import OPS
from chunkplan.packing import PACKERS
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.load import evaluation_folder
from chunkplan.planfile.plan import PlanStep
from chunkplan.planning.batches import batch_sizes, epoch_order
from chunkplan.planning.targets import count_masked_targets, count_part_targets

#: (stages, schedule, virtual stages)
PIPELINES = st.one_of(
    st.just((1, "algorithm2", 1)),
    st.tuples(st.integers(2, 4), st.sampled_from(["1f1b", "zero-bubble"]), st.just(1)),
    st.tuples(st.integers(2, 4), st.just("interleaved"), st.integers(1, 3)),
)


def piped(pipeline: tuple[int, str, int], **others: Any) -> PlanConfig:
    pp, schedule, virtual_stages = pipeline
    return PlanConfig(pp=pp, schedule=schedule, virtual_stages=virtual_stages, **others)


CONFIGS = st.builds(
    piped,
    PIPELINES,
    k_by_length=st.sampled_from([None, ((10, 2),), ((20, 1), (60, 3))]),
    chunk_size=st.integers(1, 40),
    k=st.integers(1, 5),
    global_batch=st.integers(1, 12),
    epochs=st.integers(1, 2),
    last_batch=st.sampled_from(["keep", "drop"]),
    dp=st.integers(1, 4),
    seed=st.integers(0, 3),
    split=st.sampled_from(["full", "even", "cost"]),
    tail_sharing=st.booleans(),
    packing=st.sampled_from(sorted(PACKERS)),
    equal_chunks=st.booleans(),
)


def write_analysis(folder: Path, lengths: list[int], seed: int = 0) -> Path:
    """An analysis of random tokens with random target masks."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    writer = AnalysisWriter(folder)
    for record, length in enumerate(lengths):
        target = random.random(length) < 0.6
        target[0] = False
        writer.add(0, record, random.integers(0, 50, length, dtype=np.int32), target)
    writer.finish(exact=True, sources=[{"path": "d.jsonl", "schema": "text", "records": len(lengths)}])
    return folder


@settings(max_examples=90)
@given(st.lists(st.integers(1, 130), min_size=1, max_size=25), CONFIGS, st.booleans())
def test_every_plan_keeps_every_invariant(lengths: list[int], config: PlanConfig, with_tokens: bool) -> None:
    """Whatever lengths and configuration: all the named invariants hold on the written files."""
    if config.last_batch == "drop" and len(lengths) < config.global_batch:
        config = replace(config, global_batch=len(lengths))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "lengths.npy"
        if with_tokens:
            source = write_analysis(Path(folder) / "analysis", lengths)
        else:
            np.save(source, np.array(lengths))
        plan = build(source, Path(folder) / "plan", config)
        validation = validate(plan.path)
        assert validation.ok, validation.violations
        assert plan.manifest["totals"]["num_sequences"] + plan.manifest["totals"]["num_dropped_sequences"] == (
            config.epochs * len(lengths)
        )


def save(path: Path, lengths: list[int]) -> Path:
    """A file of lengths."""
    np.save(path / "lengths.npy", np.array(lengths))
    return path / "lengths.npy"


def first_step(folder: Path, lengths: list[int], **config: Any) -> PlanStep:
    """The first step of a plan of some lengths, which has to keep every invariant."""
    plan = build(save(folder, lengths), folder / "plan", PlanConfig(**{"chunk_size": 8, "k": 1, **config}))
    assert validate(plan.path).ok
    return next(plan.iter_steps())


def test_the_same_input_makes_the_same_plan_in_another_process_with_any_workers(tmp_path: Path) -> None:
    """The content hash is pinned: it must not change with machine, process, workers, or release of a library."""
    lengths = save(tmp_path, (np.arange(1, 4000) ** 2 % 997 + 1).tolist())
    code = (
        "import chunkplan, sys; from chunkplan.planning import pipeline; pipeline.BLOCK_SEQUENCES = 256\n"
        "print(chunkplan.build(sys.argv[1], sys.argv[2], chunkplan.PlanConfig("
        "chunk_size=256, k=2, global_batch=64, dp=3, pp=2, seed=5, epochs=2), workers=int(sys.argv[3])).content_hash)"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code, str(lengths), str(tmp_path / workers), workers],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for workers in ("1", "2", "3")
    }
    assert hashes == {"092c4b4d9df446bc0eb9ad6198c5cf2a896562e34cb006c5740e7152a4360ae5"}


def test_an_epoch_is_a_shuffle_of_its_own_and_no_step_spans_two(tmp_path: Path) -> None:
    config = PlanConfig(chunk_size=8, k=1, global_batch=4, epochs=2)
    assert batch_sizes(10, config).tolist() == [4, 4, 2]
    assert batch_sizes(10, replace(config, last_batch="drop")).tolist() == [4, 4]
    assert batch_sizes(8, config).tolist() == [4, 4]
    plan = build(save(tmp_path, list(range(1, 11))), tmp_path / "plan", replace(config, chunk_size=16))
    assert [(step.step, step.epoch, step.num_sequences) for step in plan.iter_steps()] == [
        (0, 0, 4),
        (1, 0, 4),
        (2, 0, 2),
        (3, 1, 4),
        (4, 1, 4),
        (5, 1, 2),
    ]
    once = np.ones(10, np.int32)
    first, second = (epoch_order(once, seed=0, epoch=epoch) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first.tolist() != second.tolist()
    assert epoch_order(once, seed=1, epoch=0).tolist() != first.tolist()
    assert sorted(epoch_order(np.array([0, 2, 1], np.int32), seed=0, epoch=0)) == [1, 1, 2]


def test_every_place_in_the_shuffle_is_equally_likely() -> None:
    """Over 2,000 seeds each of five sequences comes first about 400 times (within five standard deviations)."""
    once = np.ones(5, np.int32)
    firsts = np.bincount([epoch_order(once, seed, 0)[0] for seed in range(2000)], minlength=5)
    assert np.abs(firsts - 400).max() < 5 * np.sqrt(2000 * 0.2 * 0.8)


@given(st.lists(st.booleans(), min_size=2, max_size=60), st.integers(1, 20))
def test_targets_across_chunk_borders_are_counted_once_where_they_are_predicted(mask: list[bool], size: int) -> None:
    target = np.array([False, *mask[1:]])
    start = np.arange(0, target.size, size)
    end = np.minimum(start + size, target.size)
    counts = count_masked_targets(target, start, end)
    assert counts.sum() == target.sum()
    for low, high, count in zip(start, end, counts, strict=True):
        predicted = [position + 1 for position in range(low, high) if position + 1 < target.size]
        assert count == sum(target[position] for position in predicted)
    twice = [np.tile(values, 2) for values in (0 * start, start, end, 0 * start + target.size)]
    everything = np.arange(target.size) > 0
    for mask in (None, lambda sequence_id: everything):
        assert count_part_targets(*twice, mask).tolist() == 2 * count_masked_targets(everything, start, end).tolist()


#: What a chunk costs beside its tokens, forward and backward, in microseconds.
COST = CostModel()
CHUNK_US = 3 * COST.chunk_overhead_ns / 1e3


def test_costs_grow_with_the_prefix_and_recompute(tmp_path: Path) -> None:
    """Of equal parts the later one costs more attention, and one that is recomputed costs a forward more."""
    plan = first_step(tmp_path, [3 * 8192], chunk_size=8192, k=2)
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
    tokens, squares = np.array([sum(lengths)]), np.array([sum(length**2 for length in lengths)], float)
    by_op = durations(tokens, squares, COST.rates, [7, 7, 7, 7])[:, :, 0] / 1e3
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
    assert "--memory-tokens 28" in error.value.hint
    one = given | {"k": 1}
    with pytest.raises(UsageError, match="step 0, rank 0: 1f1b holds activations of") as error:
        build(lengths, tmp_path / "plan", PlanConfig(**one, memory_tokens=8))
    assert "search" in error.value.hint
    assert not (tmp_path / "plan").exists()
    assert build(lengths, tmp_path / "plan", PlanConfig(**one, memory_tokens=8, schedule="search"))


def test_longer_sequences_may_keep_fewer_chunks(tmp_path: Path) -> None:
    """K is 3, but 2 of more than 30 tokens and 1 of more than 40."""
    lengths = save(tmp_path, [24, 30, 31, 40, 41])
    plan = build(lengths, tmp_path / "plan", PlanConfig(chunk_size=8, k=3, k_by_length=((30, 2), (40, 1))))
    chunks = plan.chunks().to_pylist()
    kept: dict[int, int] = {}
    for chunk in chunks:
        tokens = max(np.load(lengths)[piece["sequence_id"]] for piece in chunk["segments"])
        kept[int(tokens)] = kept.get(int(tokens), 0) + chunk["keeps_activations"]
    assert kept == {24: 3, 30: 3, 31: 2, 40: 2, 41: 1}
    assert validate(plan.path).ok


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": "fastest"}, "expected algorithm2 or 1f1b or interleaved or zero-bubble or search"),
        ({"schedule": "1f1b"}, "for two stages or more, pp is 1"),
        ({"schedule": "algorithm2", "pp": 2}, "for one stage, pp is 2"),
        ({"virtual_stages": 2, "pp": 2}, "1f1b has one virtual stage"),
        ({"schedule": "interleaved", "pp": 2, "virtual_stages": 0}, "virtual-stages is 0"),
        ({"memory_tokens": 0}, "memory-tokens is 0"),
        ({"k_by_length": ((5, 1), (5, 2))}, "tokens ascending"),
        ({"k_by_length": (5, 1)}, "pairs of tokens and K"),
    ],
)
def test_schedules_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PlanConfig(chunk_size=8, k=1, **changes)


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="28 layers, too few for 15 stages of 2 parts"):
        build(save(tmp_path, [5]), tmp_path / "plan", PlanConfig(chunk_size=8, k=1, pp=15, schedule="interleaved"))


def test_groups_run_shortest_first(tmp_path: Path) -> None:
    """What runs between a group's backwards on a pipeline is then of a longer group and mostly keeps nothing."""
    step = first_step(tmp_path, [50, 20, 30, 5], tail_sharing=False)
    assert [chunk.group_size for chunk in step.chunks[0]] == [1] + [3] * 3 + [4] * 4 + [7] * 7


def test_tail_sharing_fills_the_room_that_split_sequences_leave(tmp_path: Path) -> None:
    """The last chunk of 11 tokens has room for 5: two whole short sequences run there, not in a chunk of their own."""
    apart = first_step(tmp_path, [11, 3, 2], tail_sharing=False)
    assert [chunk.num_tokens for chunk in apart.chunks[0]] == [5, 8, 3]
    shared = first_step(tmp_path, [11, 3, 2])
    assert [(chunk.num_tokens, chunk.group_id, len(chunk.segments)) for chunk in shared.chunks[0]] == [
        (8, 0, 1),
        (8, 0, 3),
    ]
    assert (shared.num_chunks, shared.chunks_lower_bound, shared.optimal) == (2, 2, True)


def test_chunks_that_keep_activations_are_filled_first(tmp_path: Path) -> None:
    """Parts of 6, 6 and 6 leave room for 2 each, and with K = 1 only the last keeps activations: 2s go there first."""
    one = first_step(tmp_path, [18, 2], split="even").chunks[0]
    assert [chunk.num_tokens for chunk in one] == [6, 6, 8]
    two = first_step(tmp_path, [18, 2, 2], split="even").chunks[0]
    assert sorted(chunk.num_tokens for chunk in two[:2]) == [6, 8]
    assert two[2].num_tokens == 8
    assert not any(chunk.keeps_activations for chunk in two[:2])
    lengths = [36_000, 3000, 2500]  # to recompute 2500 tokens costs more than a chunk of their own
    dear = first_step(tmp_path, lengths, chunk_size=15_000, split="even").chunks[0]
    assert [chunk.num_tokens for chunk in dear] == [2500, 12_000, 12_000, 15_000]


def test_tails_are_shared_on_one_stage_unless_said_otherwise() -> None:
    """On a pipeline standalone chunks fill the bubbles between the dependent ones."""
    assert PlanConfig(chunk_size=8, k=1).tail_sharing is True
    assert PlanConfig(chunk_size=8, k=1, pp=2).tail_sharing is False
    assert PlanConfig(chunk_size=8, k=1, pp=2, tail_sharing=True).tail_sharing is True


def test_more_ranks_than_sequences_leave_zero_loss_chunks(tmp_path: Path) -> None:
    step = first_step(tmp_path, [5, 6], dp=4)
    assert [len(chunks) for chunks in step.chunks.values()] == [1, 1, 1, 1]
    assert (step.num_chunks, step.chunks_lower_bound, step.optimal) == (4, 4, True)
    assert sorted(chunk.num_tokens for chunks in step.chunks.values() for chunk in chunks) == [0, 0, 5, 6]
    plan = chunkplan.load_plan(tmp_path / "plan")
    assert chunkplan.summarize_plan(plan.steps(), plan.chunks(), plan.manifest).num_zero_loss == 2


def test_equal_chunks_fill_up_every_rank(tmp_path: Path) -> None:
    """One rank has the 7 chunks of 50 tokens, so the other has 7 too."""
    step = first_step(tmp_path, [50, 5], dp=2, equal_chunks=True)
    assert [len(chunks) for chunks in step.chunks.values()] == [7, 7]
    assert sum(not chunk.segments for chunk in step.chunks[1]) == 6
    assert sum(chunk.num_tokens for chunk in step.chunks[1]) == 5


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


@settings(max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 2), st.booleans())
def test_no_plan_of_a_step_has_fewer_chunks_than_its_bounds(lengths: list[int], dp: int, tail_sharing: bool) -> None:
    """Against every way to put the short sequences into chunks: those of parts, or of their own."""
    config = PlanConfig(chunk_size=8, k=1, dp=dp, tail_sharing=tail_sharing)
    with tempfile.TemporaryDirectory() as folder:
        step = next(build(save(Path(folder), lengths), Path(folder) / "plan", config).iter_steps())
    rooms = [
        room for length in lengths if length > 8 for room in [0] * (length // 8) + [-length % 8] * (length % 8 > 0)
    ]
    best = fewest_chunks([length for length in lengths if length <= 8], rooms if tail_sharing else [0] * len(rooms))
    assert step.chunks_lower_bound <= max(best, dp)
    assert step.chunks_lower_bound <= step.packing_lower_bound <= step.num_chunks
    assert step.optimal == (step.num_chunks == step.chunks_lower_bound)
    if dp == 1:
        assert best <= step.num_chunks


def fewest_chunks(items: list[int], rooms: list[int]) -> int:
    if not items:
        return len(rooms)
    item, rest = items[0], items[1:]
    tried = [
        fewest_chunks(rest, [*rooms[:index], room - item, *rooms[index + 1 :]])
        for index, room in enumerate(rooms)
        if room >= item and room not in rooms[:index]
    ]
    return min([*tried, fewest_chunks(rest, [*rooms, 8 - item])])


@pytest.mark.parametrize("balance", ["spread", "search"])
@pytest.mark.parametrize("equal_chunks", [False, True])
def test_search_never_makes_a_step_slower(tmp_path: Path, balance: str, equal_chunks: bool) -> None:
    """...and its plans keep every invariant."""
    lengths = (np.arange(1, 65) ** 2 % 61 * 37 + 90).tolist()
    config = {"chunk_size": 1024, "k": 2, "dp": 3, "global_batch": 16, "equal_chunks": equal_chunks}
    (tmp_path / "spread").mkdir()
    spread = first_step(tmp_path / "spread", lengths, **config)
    assert first_step(tmp_path, lengths, **config, balance=balance).predicted_us <= spread.predicted_us


def test_nothing_is_split_where_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sequence 1 has 9 tokens, and nothing may be split") as refused:
        build(save(tmp_path, [8, 9, 10]), tmp_path / "plan", PlanConfig(chunk_size=8, k=1, split="none"))
    assert str(refused.value.where).endswith("lengths.npy, row 1")
    assert not (tmp_path / "plan").exists()
    source = write_analysis(tmp_path / "analysis", [8, 9])
    with pytest.raises(DataError) as refused:
        build(source, tmp_path / "plan", PlanConfig(chunk_size=8, k=1, split="none"))
    assert refused.value.where == "d.jsonl:2"
    step = first_step(tmp_path, [8, 8, 3, 4], split="none")
    assert [chunk.num_tokens for chunk in step.chunks[0]] == [8, 8, 7]


def test_uniform_long_sequences_fill_their_chunks_and_balance(tmp_path: Path) -> None:
    """Pre-training data: 64 sequences of 4 x ChunkSize over 4 ranks are 64 full chunks on each, proved to be fewest."""
    step = first_step(tmp_path, [32_768] * 64, chunk_size=8192, k=2, dp=4, global_batch=64)
    assert [len(chunks) for chunks in step.chunks.values()] == [64] * 4
    assert {chunk.num_tokens for chunks in step.chunks.values() for chunk in chunks} == {8192}
    assert step.optimal
    assert not step.exceeds_share


def test_what_is_held_out_has_a_plan_of_its_own(tmp_path: Path) -> None:
    """Every sequence is in one of the two, and both keep every invariant."""
    lengths = list(range(1, 401))
    plan = build(save(tmp_path, lengths), tmp_path / "plan", PlanConfig(chunk_size=512, k=1, holdout=0.1, epochs=2))
    evaluation = chunkplan.load_plan(evaluation_folder(plan.path))
    assert evaluation.path.name == "plan-eval"
    assert validate(plan.path).ok
    assert validate(evaluation.path).ok
    ids = [
        {segment.sequence_id for step in each.iter_steps() for chunk in step.chunks[0] for segment in chunk.segments}
        for each in (plan, evaluation)
    ]
    assert not ids[0] & ids[1]
    assert ids[0] | ids[1] == set(range(400))
    assert 20 <= len(ids[1]) <= 60
    assert evaluation.manifest["totals"]["num_sequences"] == len(ids[1]) == plan.manifest["selection"]["num_held_out"]


def test_a_mix_repeats_and_leaves_out(tmp_path: Path) -> None:
    """Sources of 10 sequences each, taken twice, half and not at all; twice may be in one step and one chunk."""
    analysis = tmp_path / "analysis"
    analysis.mkdir()
    writer = AnalysisWriter(analysis)
    for source in range(4):
        for record in range(10):
            writer.add(source, record, np.full(5 + 8 * source, record, np.int32), np.arange(5 + 8 * source) > 0)
    writer.finish(
        exact=True, sources=[{"path": f"in/{name}.jsonl", "schema": "text", "records": 10} for name in "abcd"]
    )
    mix = {"in/a.jsonl": 2, "b.jsonl": 0.5, "c.jsonl": 0}
    plan = build(analysis, tmp_path / "plan", PlanConfig(chunk_size=16, k=1, mix=mix, dp=2))
    assert validate(plan.path).ok
    taken = [
        segment.sequence_id // 10
        for step in plan.iter_steps()
        for chunks in step.chunks.values()
        for chunk in chunks
        for segment in chunk.segments
        if segment.start == 0
    ]
    assert np.bincount(taken).tolist() == [20, 5, 0, 10]
    assert plan.config.mix == {"in/a.jsonl": 2, "in/b.jsonl": 0.5, "in/c.jsonl": 0}
    assert [source["num_occurrences"] for source in plan.manifest["selection"]["sources"]] == [20, 5, 0, 10]


@pytest.mark.parametrize(
    "lengths",
    [[2**31 - 1], [2**31 - 1, 5, 2**31 - 1], [1], [1] * 200],
    ids=["the longest there can be", "two of them", "one token", "many of one token"],
)
def test_extreme_lengths_are_planned(tmp_path: Path, lengths: list[int]) -> None:
    step = first_step(tmp_path, lengths, chunk_size=2**26, k=3, dp=2)
    assert step.num_tokens == sum(lengths)
    assert min(chunk.cost for chunks in step.chunks.values() for chunk in chunks) > 0


def test_more_chunks_than_a_plan_can_hold_are_refused_before_they_are_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="segments"):
        build(save(tmp_path, [2**31 - 1] * 2), tmp_path / "plan", PlanConfig(chunk_size=1, k=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 0}, "chunk-size is 0"),
        ({"k": 0}, "k is 0"),
        ({"dp": 0}, "dp is 0"),
        ({"pp": -1}, "pp is -1"),
        ({"global_batch": 2.5}, "global-batch is 2.5"),
        ({"epochs": True}, "epochs is True"),
        ({"last_batch": "pad"}, "last-batch is 'pad'"),
        ({"split": "half"}, "split is 'half', expected full or even or cost or none"),
        ({"packing": "ffd"}, "packing is 'ffd'"),
        ({"balance": "best"}, "balance is 'best'"),
        ({"equal_chunks": 1}, "equal-chunks is 1"),
        ({"holdout": 0}, "holdout is 0"),
        ({"holdout": 1.5}, "holdout is 1.5"),
        ({"part": "eval"}, "nothing is held out"),
        ({"mix": {"a": -1}}, "the weight of a is -1"),
    ],
)
def test_a_config_checks_itself(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PlanConfig(**{"chunk_size": 8, "k": 1, **change})  # type: ignore[arg-type]


def test_dropping_every_sequence_is_refused(tmp_path: Path) -> None:
    save(tmp_path, [5, 6])
    with pytest.raises(UsageError, match="all 2 sequences would be dropped"):
        build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=8, k=1, last_batch="drop"))
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize("bad", [[0, 5], [-3], [2**31], []])
def test_impossible_lengths_are_refused_by_row(tmp_path: Path, bad: list[int]) -> None:
    np.save(tmp_path / "lengths.npy", np.array(bad, np.int64))
    with pytest.raises(DataError, match="no lengths in it" if not bad else "row 0"):
        build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=8, k=1))
