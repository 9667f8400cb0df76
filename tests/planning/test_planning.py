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
from chunkplan.layers import FAMILIES
from chunkplan.packing import PACKERS
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.load import evaluation_folder
from chunkplan.planning.batches import batch_sizes, epoch_order
from tests.support.places import GOLDEN
from tests.support.planned_steps import first_step, save, write_analysis

#: (stages, schedule, virtual stages)
PIPELINES = st.one_of(
    st.just((1, "algorithm2", 1)),
    *(
        st.tuples(st.integers(2, 4), st.just(name), st.just(family.placement.virtual_stages))
        for name, family in FAMILIES.items()
        if name not in ("algorithm2", "search")
    ),
    st.tuples(st.integers(2, 4), st.just("interleaved"), st.just(3)),
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


@pytest.mark.soak
def test_the_same_input_makes_the_same_plan_in_another_process_with_any_workers(tmp_path: Path) -> None:
    """The content hash is pinned: it must not change with machine, process, workers, or release of a library."""
    lengths = save(tmp_path, (np.arange(1, 4000) ** 2 % 997 + 1).tolist())
    code = (
        "import chunkplan, sys; from chunkplan.planning import batches; batches.BLOCK_SEQUENCES = 256\n"
        "print(chunkplan.build(sys.argv[1], sys.argv[2], chunkplan.PlanConfig("
        "chunk_size=256, k=2, global_batch=64, dp=3, pp=2, cp='off', seed=5, epochs=2), "
        "cost=chunkplan.CostModel(hardware=chunkplan.load_hardware(sys.argv[4])), "
        "workers=int(sys.argv[3])).content_hash)"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code, str(lengths), str(tmp_path / workers), workers, str(GOLDEN / "h100.toml")],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for workers in ("1", "2", "3")
    }
    assert hashes == {"e2afcc4f4b4e6d518d9175bbfcbcc0faa043d55a1dd982592b710b395d01eed6"}


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


@settings(max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 2), st.booleans())
def test_no_plan_of_a_step_has_fewer_chunks_than_its_bounds(lengths: list[int], dp: int, tail_sharing: bool) -> None:
    """Against every way to put the short sequences into chunks: those of parts, or of their own."""
    config = PlanConfig(chunk_size=8, k=1, dp=dp, cp="off", tail_sharing=tail_sharing)
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
