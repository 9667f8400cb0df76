"""The planner: every plan it makes keeps every invariant, and the same input makes the same plan."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import chunkplan
from chunkplan import PlanConfig, build, validate
from chunkplan.cost.flops import CostModel
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.plan import Plan
from chunkplan.planning import batches, count_all_targets, count_masked_targets, epoch_order, sequence_costs

CONFIGS = st.builds(
    PlanConfig,
    chunk_size=st.integers(1, 40),
    k=st.integers(1, 5),
    global_batch=st.integers(1, 12),
    epochs=st.integers(1, 2),
    last_batch=st.sampled_from(["keep", "drop"]),
    dp=st.integers(1, 4),
    pp=st.integers(1, 4),
    seed=st.integers(0, 3),
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


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 130), min_size=1, max_size=25), CONFIGS, st.booleans())
def test_every_plan_keeps_every_invariant(lengths: list[int], config: PlanConfig, with_tokens: bool) -> None:
    """Whatever lengths, ChunkSize, K, dp and pp: all the named invariants hold on the written files."""
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


def test_the_same_input_makes_the_same_plan_in_another_process(tmp_path: Path) -> None:
    """The content hash is pinned: it must not change with machine, process, or release of a library."""
    lengths = (np.arange(1, 400) ** 2 % 997 + 1).tolist()
    np.save(tmp_path / "lengths.npy", np.array(lengths))
    code = (
        "import chunkplan, sys; print(chunkplan.build(sys.argv[1], sys.argv[2], chunkplan.PlanConfig("
        "chunk_size=256, k=2, global_batch=64, dp=3, pp=2, seed=5, epochs=2)).content_hash)"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "lengths.npy"), str(tmp_path / name)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for name in ("one", "two")
    }
    assert hashes == {"22d6ca42383e9c6305ce2d4198f3883225b036e34beefb43631e8dbc36fea299"}


def test_an_epoch_is_a_shuffle_of_its_own_and_no_step_spans_two() -> None:
    config = PlanConfig(chunk_size=8, k=1, global_batch=4, epochs=2)
    steps = list(batches(10, config))
    assert [(step, epoch, len(ids)) for step, epoch, ids in steps] == [
        (0, 0, 4),
        (1, 0, 4),
        (2, 0, 2),
        (3, 1, 4),
        (4, 1, 4),
        (5, 1, 2),
    ]
    first, second = (np.concatenate([ids for _, epoch, ids in steps if epoch == wanted]) for wanted in (0, 1))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first.tolist() != second.tolist()
    assert epoch_order(10, seed=1, epoch=0).tolist() != epoch_order(10, seed=0, epoch=0).tolist()


@given(st.lists(st.booleans(), min_size=2, max_size=60), st.integers(1, 20))
def test_targets_across_chunk_borders_are_counted_once_where_they_are_predicted(mask: list[bool], size: int) -> None:
    target = np.array([False, *mask[1:]])
    start = np.arange(0, target.size, size, dtype=np.int32)
    end = np.minimum(start + size, target.size).astype(np.int32)
    counts = count_masked_targets(target, start, end)
    assert counts.sum() == target.sum()
    for low, high, count in zip(start, end, counts, strict=True):
        predicted = [position + 1 for position in range(low, high) if position + 1 < target.size]
        assert count == sum(target[position] for position in predicted)
    everything = np.arange(target.size) > 0
    assert count_all_targets(0, start, end).tolist() == count_masked_targets(everything, start, end).tolist()


def test_costs_grow_with_the_prefix_and_recompute(tmp_path: Path) -> None:
    """Of equal parts the later one costs more attention, and one that is recomputed costs a forward more."""
    np.save(tmp_path / "lengths.npy", np.array([3 * 8192]))
    plan = build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=8192, k=2))
    first, second, third = next(plan.iter_steps()).chunks[0]
    assert not first.keeps_activations
    assert second.keeps_activations
    assert third.keeps_activations
    assert third.cost > second.cost
    one_pass = build(tmp_path / "lengths.npy", tmp_path / "whole", PlanConfig(chunk_size=3 * 8192, k=1))
    [whole] = next(one_pass.iter_steps()).chunks[0]
    assert first.cost * 3 / 4 + second.cost + third.cost == pytest.approx(whole.cost, rel=1e-6)


def test_predictions_follow_from_the_costs_of_chunks(tmp_path: Path) -> None:
    """One stage takes the sum of its chunks; one chunk takes as long on four stages as on one."""
    np.save(tmp_path / "lengths.npy", np.array([60_000, 9_000, 500]))

    def plan(**config: int) -> Plan:
        return build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(**{"chunk_size": 8192, "k": 2, **config}))

    one = next(plan().iter_steps())
    total = sum(chunk.cost for chunk in one.chunks[0])
    assert one.predicted_us == pytest.approx(total, rel=1e-6)
    assert one.schedule_us[0, 0] == pytest.approx(total, rel=1e-6)
    recomputed = sum(chunk.cost / 4 for chunk in one.chunks[0] if not chunk.keeps_activations)
    assert one.lower_bound_us == pytest.approx(total - recomputed, rel=1e-6)

    staged = next(plan(chunk_size=70_000, pp=4).iter_steps())
    [chunk] = staged.chunks[0]
    assert staged.predicted_us == pytest.approx(chunk.cost, rel=1e-6)
    ends = [staged.schedule_us[0, stage] for stage in range(4)]
    assert ends == sorted(ends, reverse=True)
    assert ends[3] == pytest.approx(
        (4 + 2) / 12 * chunk.cost, rel=1e-6
    )  # four forwards and its own backward of 12 parts
    assert staged.lower_bound_us == pytest.approx(chunk.cost / 4, rel=1e-6)

    config = PlanConfig(chunk_size=8192, k=2)
    costs = sequence_costs(np.array([60_000, 9_000, 500], np.int32), config, CostModel())
    assert costs.sum() / 1e3 == pytest.approx(total, rel=1e-6), "ranks are balanced by what will be predicted"


def test_groups_run_shortest_first(tmp_path: Path) -> None:
    """What runs between a group's backwards on a pipeline is then of a longer group and mostly keeps nothing."""
    np.save(tmp_path / "lengths.npy", np.array([50, 20, 30, 5]))
    plan = build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=8, k=1))
    sizes = [chunk.group_size for chunk in next(plan.iter_steps()).chunks[0]]
    assert sizes == [1] + [3] * 3 + [4] * 4 + [7] * 7


def test_more_ranks_than_sequences_leave_zero_loss_chunks(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([5, 6]))
    plan = build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=8, k=1, dp=4))
    step = next(plan.iter_steps())
    assert [len(chunks) for chunks in step.chunks.values()] == [1, 1, 1, 1]
    assert (step.num_chunks, step.chunks_lower_bound, step.optimal) == (4, 4, True)
    assert sorted(chunk.num_tokens for chunks in step.chunks.values() for chunk in chunks) == [0, 0, 5, 6]
    assert validate(plan.path).ok
    assert chunkplan.summarize_plan({"steps": plan.steps(), "chunks": plan.chunks()}, plan.manifest).num_zero_loss == 2


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
    ],
)
def test_a_config_checks_itself(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PlanConfig(**{"chunk_size": 8, "k": 1, **change})  # type: ignore[arg-type]


def test_dropping_every_sequence_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([5, 6]))
    with pytest.raises(UsageError, match="all 2 sequences would be dropped"):
        build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=8, k=1, last_batch="drop"))
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize("bad", [[0, 5], [-3], [2**31], []])
def test_impossible_lengths_are_refused_by_row(tmp_path: Path, bad: list[int]) -> None:
    np.save(tmp_path / "lengths.npy", np.array(bad, np.int64))
    with pytest.raises(DataError, match="no lengths in it" if not bad else "row 0"):
        build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=8, k=1))
