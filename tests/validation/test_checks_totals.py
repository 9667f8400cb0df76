"""The invariants of sums, broken on purpose, are found under their names and at their places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chunkplan import PlanConfig, build, validate
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.load import load_analysis
from tests.support.manifests import change_manifest
from tests.support.plan_rows import Case, Rows, assert_named, long_group, tamper


def optimal_denied(rows: Rows) -> None:
    for row in rows["steps"]:
        row["optimal"] = not row["optimal"]


def negative_cost(rows: Rows) -> None:
    rows["chunks"][2]["cost"] = -1.0


def wrong_targets(rows: Rows) -> None:
    long_group(rows)[1]["num_target_tokens"] += 1


def wrong_totals(rows: Rows) -> None:
    rows["steps"][1]["num_tokens"] += 1


CASES: dict[str, Case] = {
    "optimality misstated": ("totals", optimal_denied, (0, None, None)),
    "a negative cost": ("totals", negative_cost, (0, 0, 2)),
    "targets miscounted": ("targets", wrong_targets, None),
    "totals miscounted": ("totals", wrong_totals, (1, None, None)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_invariant_is_named(plan: Path, case: str) -> None:
    assert_named(plan, CASES[case])


def test_the_longest_sequence_is_that_of_the_plan_not_of_the_analysis(tmp_path: Path) -> None:
    """The longest one is of a source that the mix leaves out."""
    folder = tmp_path / "analysis"
    folder.mkdir()
    writer = AnalysisWriter(folder)
    for source, length in ((0, 5), (1, 9)):
        writer.add(source, 0, np.zeros(length, np.int32), np.arange(length) > 0)
    sources = [{"path": path, "schema": None, "records": 1} for path in ("a", "b")]
    writer.finish(exact=True, sources=sources, rejected={}, max_token_id=0)
    plan = build(folder, tmp_path / "plan", PlanConfig(chunk_size=16, k=1, mix={"b": 0}))
    assert plan.manifest["totals"]["longest_sequence"] == 5
    assert validate(plan.path).ok
    change_manifest(plan.path, "totals", "longest_sequence", value=9)
    assert [found.invariant for found in validate(plan.path).violations] == ["totals"]


@pytest.mark.parametrize(
    ("chunks_bound", "packing_bound", "valid"),
    [(1, 1, True), (1, 2, True), (-1, 1, False), (2, 1, False), (1, 3, False)],
)
def test_lower_bounds_that_contradict_each_other_are_found(
    handmade_plan: Callable[..., tuple[Path, Path]],
    random_sequences: Callable[..., Any],
    chunks_bound: int,
    packing_bound: int,
    valid: bool,
) -> None:
    """Of a step of two chunks."""
    plan, _ = handmade_plan(random_sequences([9, 8]), [{0: [[(0, 0, 9)], [(1, 0, 8)]]}])

    def change(rows: Rows) -> None:
        [step] = rows["steps"]
        step["chunks_lower_bound"], step["packing_lower_bound"] = chunks_bound, packing_bound
        step["optimal"] = chunks_bound == 2

    tamper(plan, change)
    result = validate(plan)
    assert result.ok == valid
    assert [(found.invariant, found.step) for found in result.violations] == ([] if valid else [("totals", 0)])


def test_targets_of_parts_are_counted_over_record_batches(tmp_path: Path) -> None:
    """Three record batches of at most 4,096 sequences, some of them split; masks do not start at whole bytes."""
    folder = tmp_path / "analysis"
    folder.mkdir()
    writer = AnalysisWriter(folder)
    random = np.random.default_rng(1)
    for record in range(9000):
        length = int(random.integers(17, 60)) if record % 30 == 0 else int(random.integers(1, 4))
        writer.add(0, record, np.zeros(length, np.int32), (np.arange(length) > 0) & (random.random(length) < 0.5))
    writer.finish(exact=True, sources=[{"path": "d", "schema": None, "records": 9000}], rejected={}, max_token_id=0)
    plan = build(folder, tmp_path / "plan", PlanConfig(chunk_size=16, k=1, global_batch=4500)).path
    assert len(list(load_analysis(folder).tokens().batches())) == 3
    assert validate(plan).ok
    for position in (0, -1):

        def move(rows: Rows, position: int = position) -> None:
            first, second = rows["chunks"][position], rows["chunks"][position // 2 + 1]
            first["num_target_tokens"] += 1
            second["num_target_tokens"] -= 1

        tamper(plan, move)
        assert "targets" in {found.invariant for found in validate(plan).violations}
