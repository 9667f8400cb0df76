"""SampleGroups of sequences, such as the rollouts of a prompt, come whole: in steps, held out, and mixed."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkplan import PlanConfig, build, build_like, load_analysis, load_plan, validate
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.plan import Plan
from chunkplan.planning.batches import SampleGroups, epoch_order, epoch_steps
from chunkplan.planning.selection import expected_copies
from chunkplan.tuning.options import LADDER, TuneOptions
from chunkplan.tuning.sampling import sample_steps
from chunkplan.tuning.tune import tune
from tests.support.analyses import write_groups
from tests.support.plan_rows import Rows, tamper

SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=14)


def groups_of(sizes: list[int]) -> np.ndarray:
    """The first sequence of the group of each, mixed up."""
    order = np.random.default_rng(len(sizes)).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return np.unique(order, return_index=True)[1][order]


def steps_of(plan: Plan) -> list[Counter[int]]:
    """How often each step has each sequence."""
    return [
        Counter(
            segment.sequence_id
            for chunks in step.chunks.values()
            for chunk in chunks
            for segment in chunk.segments
            if segment.start == 0
        )
        for step in plan.iter_steps()
    ]


@given(SIZES, st.integers(6, 12), st.sampled_from(["keep", "drop"]), st.integers(0, 3))
def test_a_step_takes_whole_groups_in_order_while_they_fit(
    sizes: list[int], global_batch: int, last_batch: str, weight: int
) -> None:
    group = groups_of(sizes)
    copies = np.full(group.size, weight, np.int32)
    copies[group == group.min()] = 1
    config = PlanConfig(chunk_size=8, k=1, global_batch=global_batch, last_batch=last_batch)
    order, steps = epoch_steps(copies, config, 0, SampleGroups.of(group))
    parts = np.split(order, np.cumsum(steps)[:-1]) if steps.size else []
    sizes_of = np.bincount(group)
    heads = [group[part[0]] for part in parts]
    for step, part in enumerate(parts):
        counts = np.bincount(part, minlength=group.size)
        assert 0 < part.size <= global_batch and (counts == counts[group]).all()
        if step + 1 < len(parts):
            assert part.size + sizes_of[heads[step + 1]] > global_batch
    taken = np.bincount(order, minlength=group.size)
    assert (taken <= copies).all()
    smallest = sizes_of[group[copies > 0]].min()
    if last_batch == "keep":
        assert (taken == copies).all()
    else:
        left = copies.sum() - order.size
        assert left <= global_batch - smallest
        assert left or steps[-1] + smallest > global_batch


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from(["keep", "drop"]))
def test_groups_of_one_make_the_steps_of_ordinary_data(number: int, global_batch: int, last_batch: str) -> None:
    config = PlanConfig(chunk_size=8, k=1, global_batch=global_batch, last_batch=last_batch)
    once = np.ones(number, np.int32)
    plain, sizes = epoch_steps(once, config, 1)
    order, steps = epoch_steps(once, config, 1, SampleGroups.of(np.arange(number)))
    assert plain.tolist() == order.tolist() == epoch_order(once, 0, 1)[: sizes.sum()].tolist()
    assert sizes.tolist() == steps.tolist()


@settings(max_examples=40, deadline=None)
@given(
    SIZES,
    st.builds(
        PlanConfig,
        chunk_size=st.integers(8, 30),
        k=st.integers(1, 2),
        global_batch=st.integers(6, 12),
        epochs=st.integers(1, 2),
        last_batch=st.sampled_from(["keep", "drop"]),
        dp=st.integers(1, 3),
        pp=st.integers(1, 2),
        seed=st.integers(0, 3),
        share_prefixes=st.booleans(),
        loss=st.sampled_from(["sft", "dapo", "own"]),
        mix=st.sampled_from([None, {"d0.jsonl": 0.5}, {"d1.jsonl": 3, "d0.jsonl": 1}]),
        holdout=st.sampled_from([None, 2, 0.3]),
    ),
)
def test_every_plan_of_groups_keeps_every_invariant(sizes: list[int], config: PlanConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        analysis = load_analysis(write_groups(Path(folder) / "analysis", sizes, num_sources=2))
        try:
            plan = build(analysis, Path(folder) / "plan", config)
        except UsageError as error:
            assert any(words in error.message for words in ("is left", "would be dropped", "no sequence", "no source"))
            return
        assert plan.config.loss == ("grpo" if config.loss == "sft" else config.loss)
        plans = [plan, load_plan(f"{plan.path}-eval")] if config.holdout else [plan]
        for each in plans:
            result = validate(each.path)
            assert result.ok, result.violations
            assert "whole-groups" in result.passed
        group = analysis.group
        assert group is not None
        sides = [{int(group[sequence]) for step in steps_of(each) for sequence in step} for each in plans]
        assert len(sides) == 1 or not set.intersection(*sides)


def test_weights_of_a_source_take_its_groups_equally_often(tmp_path: Path) -> None:
    analysis = load_analysis(write_groups(tmp_path / "analysis", [3, 1, 4, 2, 5, 2, 1, 1], num_sources=2))
    assert analysis.group is not None
    config = PlanConfig(chunk_size=8, k=1, mix={"d0.jsonl": 1.5, "d1.jsonl": 0.5})
    taken = sum(expected_copies(analysis, config, epoch) for epoch in range(4))
    assert (taken == taken[analysis.group]).all()
    assert set(taken[analysis.source == 0]) == {6} and set(taken[analysis.source == 1]) == {2}


def test_a_group_larger_than_a_step_is_refused_with_its_record(tmp_path: Path) -> None:
    folder = write_groups(tmp_path / "analysis", [2, 9, 3])
    for refused in (
        lambda: build(folder, tmp_path / "plan", PlanConfig(chunk_size=8, k=1, global_batch=8)),
        lambda: tune(folder, TuneOptions(gpus=8, global_batch=8)),
    ):
        with pytest.raises(UsageError, match="9 sequences belong in one step") as caught:
            refused()
        assert "d0.jsonl:" in str(caught.value.where) and "--global-batch of 9" in str(caught.value.hint)


def test_a_plan_like_one_of_groups_has_the_same_samples_in_each_step(tmp_path: Path) -> None:
    folder = write_groups(tmp_path / "analysis", [3, 1, 4, 2, 5, 2, 1, 1])
    plan = build(folder, tmp_path / "plan", PlanConfig(chunk_size=16, k=1, global_batch=6, loss="gspo"))
    like = build_like(tmp_path / "plan", tmp_path / "like", dp=2, pp=2)
    assert steps_of(plan) == steps_of(like) and like.config.loss == "gspo"


def test_a_tuning_looks_at_steps_of_whole_groups(tmp_path: Path) -> None:
    analysis = load_analysis(write_groups(tmp_path / "analysis", [4] * 20, lengths=range(1, 81)))
    options = TuneOptions(gpus=1, global_batch=6)
    config = options.plan_config(options.layouts()[0], 64, 1, "algorithm2")
    cost = options.cost(options.layouts()[0], LADDER[0])
    sample = sample_steps(analysis.num_tokens, config, cost, 100, groups=SampleGroups.of(analysis.group))
    assert sample.sizes.tolist() == [4] * 20


def move_a_sequence(rows: Rows) -> None:
    """A whole sequence of each of two steps changes place with the other."""
    one, other = (
        next(row for row in rows["chunks"] if row["step"] == step and row["segments"][0]["end"] == 9) for step in (0, 1)
    )
    one["segments"][0], other["segments"][0] = other["segments"][0], one["segments"][0]


def merge_steps(rows: Rows) -> None:
    """The second step has as many sequences as there are, and says so; the next ones would fit into the first."""
    rows["steps"][0]["num_sequences"] += 1


def early_end(rows: Rows) -> None:
    for row in rows["steps"][1:]:
        row["epoch"] = 1


@pytest.mark.parametrize(
    ("invariant", "change", "options"),
    [
        ("whole-groups", move_a_sequence, {}),
        ("batch-sizes", merge_steps, {}),
        ("batch-sizes", early_end, {}),
        ("batch-sizes", lambda rows: None, {"global_batch": 12}),
        ("batch-sizes", lambda rows: None, {"global_batch": 3}),
        ("batch-sizes", lambda rows: None, {"last_batch": "drop"}),
        ("batch-sizes", lambda rows: None, {"epochs": 2}),
    ],
)
def test_a_plan_that_breaks_groups_is_found(
    tmp_path: Path, invariant: str, change: Callable[[Rows], None], options: dict[str, object]
) -> None:
    folder = write_groups(tmp_path / "analysis", [4] * 7, lengths=[9])
    plan = build(folder, tmp_path / "plan", PlanConfig(chunk_size=9, k=1, global_batch=8)).path
    assert pq.read_table(plan / "steps.parquet")["num_sequences"].to_pylist() == [8, 8, 8, 4]
    assert validate(plan).ok
    tamper(plan, change, **options)
    assert invariant in {each.invariant for each in validate(plan).violations}


def test_groups_that_do_not_begin_before_their_sequences_are_refused(tmp_path: Path) -> None:
    folder = write_groups(tmp_path / "analysis", [2, 2])
    table = pq.read_table(folder / "sequences.parquet")
    analysis = load_analysis(folder)
    analysis.__dict__["group"] = np.array([1, 1, 3, 3])
    assert table.num_rows == 4
    with pytest.raises(DataError, match="do not begin before them"):
        build(analysis, tmp_path / "plan", PlanConfig(chunk_size=8, k=1, global_batch=8))
