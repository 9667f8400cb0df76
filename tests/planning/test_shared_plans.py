"""Plans in which ranks share sequences: every one that the planner makes keeps every invariant."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkplan import PlanConfig, build, validate
from chunkplan.cost.model import CostModel
from chunkplan.planfile.load import evaluation_folder
from tests.support.planned_steps import write_analysis
from tests.support.shared_plans import FAST, build_shared


@st.composite
def shared_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Configurations in which ranks may share sequences."""
    dp = draw(st.integers(1, 16))
    return {
        "dp": dp,
        "cp": draw(st.sampled_from(["auto", *(size for size in range(2, dp + 1) if dp % size == 0)])),
        "pp": draw(st.sampled_from([1, 2, 4])),
        "chunk_size": draw(st.integers(1, 60)),
        "k": draw(st.integers(1, 4)),
        "k_by_length": draw(st.sampled_from([None, ((10, 2),), ((20, 1), (60, 3))])),
        "global_batch": draw(st.integers(1, 12)),
        "epochs": draw(st.integers(1, 2)),
        "seed": draw(st.integers(0, 3)),
        "split": draw(st.sampled_from(["full", "even", "cost"])),
        "tail_sharing": draw(st.booleans()),
        "packing": draw(st.sampled_from(["auto", "bfd", "mbs"])),
        "equal_chunks": draw(st.booleans()),
    }


SEQUENCES = st.lists(st.one_of(st.integers(1, 60), st.integers(1, 2500)), min_size=1, max_size=20)


def check_a_plan(lengths: list[int], config: dict[str, Any], link_ns: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        validation = validate(build_shared(Path(folder), link_ns, lengths, **config).path)
        assert validation.ok, validation.violations


@settings(max_examples=30)
@given(SEQUENCES, shared_configs(), st.sampled_from([1e-6, 10.0, 1e4]))
def test_every_plan_with_groups_keeps_every_invariant(lengths: list[int], config: dict[str, Any], ns: float) -> None:
    check_a_plan(lengths, config, ns)


@pytest.mark.soak
@settings(max_examples=1000)
@given(SEQUENCES, shared_configs(), st.sampled_from([1e-6, 10.0, 1e4]))
def test_every_one_of_many_plans_with_groups_does(lengths: list[int], config: dict[str, Any], ns: float) -> None:
    check_a_plan(lengths, config, ns)


@pytest.mark.parametrize("split", ["full", "even", "cost"])
def test_no_rank_has_more_than_an_odd_chunk_size_of_what_it_shares(tmp_path: Path, split: str) -> None:
    """Both slices of a rank could be rounded up: 1,200 tokens of 8 x 9 a chunk, in 16 slices."""
    plan = build_shared(tmp_path, lengths=[1200, *range(1100, 1140)], chunk_size=9, dp=8, split=split)
    chunks = plan.chunks().to_pylist()
    assert max(row["num_tokens"] for row in chunks if row["cp_size"] > 1) <= 9
    assert validate(plan.path).ok


def test_a_sequence_may_be_shared_twice_in_a_step_and_what_is_held_out_too(tmp_path: Path) -> None:
    """By a mix, from tokens; both the plan and the one of what is held out."""
    write_analysis(tmp_path / "analysis", [700, 650, 610, 90, 40, 12, 12, 9, 5])
    config = PlanConfig(chunk_size=16, k=2, global_batch=30, dp=4, cp="auto", holdout=3, mix={"d.jsonl": 4})
    plan = build(tmp_path / "analysis", tmp_path / "plan", config, cost=CostModel(hardware=replace(FAST, link_ns=1e-6)))
    shared = [row for row in plan.chunks().to_pylist() if row["cp_size"] > 1]
    groups = {(row["segments"][0]["sequence_id"], row["step"], row["group_id"]) for row in shared}
    assert len(groups) > len({group[:2] for group in groups}), "one of them comes twice in a step"
    for path in (plan.path, evaluation_folder(plan.path)):
        assert validate(path).ok, validate(path).violations
