"""The invariants of steps and chunks, broken on purpose, are found under their names and at their places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from chunkplan import PlanConfig, build, load_plan, validate
from tests.support.manifests import change_manifest
from tests.support.plan_rows import Case, Rows, assert_named, find, tamper


def rows_unsorted(rows: Rows) -> None:
    """Whole ranks change places; within each, ids still run from 0."""
    rows["chunks"].sort(key=lambda row: (row["step"], -row["dp_rank"], row["chunk_id"]))


def sequences_misstated(rows: Rows) -> None:
    rows["steps"][1]["num_sequences"] += 1


def empty_segment(rows: Rows) -> None:
    chunk = find(rows, group_id=None)
    chunk["segments"].append({**chunk["segments"][0], "end": chunk["segments"][0]["start"]})


def gap_in_chunk_ids(rows: Rows) -> None:
    rows["chunks"][1]["chunk_id"] += 1


def rank_without_chunks(rows: Rows) -> None:
    rows["chunks"] = [row for row in rows["chunks"] if (row["step"], row["dp_rank"]) != (1, 0)]


def sequence_in_another_step(rows: Rows) -> None:
    one, other = find(rows, step=0, group_id=None), find(rows, step=1, group_id=None)
    other["segments"].append(one["segments"].pop())


def token_count_wrong(rows: Rows) -> None:
    rows["chunks"][0]["num_tokens"] += 1


def attention_kept_nowhere_known(rows: Rows) -> None:
    find(rows, keeps_activations=False)["kept_attention"] = "disk"


def attention_kept_beside_activations(rows: Rows) -> None:
    find(rows, keeps_activations=True)["kept_attention"] = "host"


CASES: dict[str, Case] = {
    "attention kept nowhere known": ("kept-attention", attention_kept_nowhere_known, None),
    "attention kept beside activations": ("kept-attention", attention_kept_beside_activations, None),
    "rows unsorted": ("chunk-ids", rows_unsorted, (0, 1, 0)),
    "sequences misstated": ("batch-sizes", sequences_misstated, (1, None, None)),
    "an empty segment": ("chunk-size", empty_segment, (0, 1, 0)),
    "a gap in chunk ids": ("chunk-ids", gap_in_chunk_ids, (0, 0, 2)),
    "a rank without chunks": ("chunk-ids", rank_without_chunks, (1, 0, None)),
    "a sequence in another step": ("batch-sizes", sequence_in_another_step, (0, None, None)),
    "tokens miscounted": ("chunk-size", token_count_wrong, (0, 0, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_invariant_is_named(plan: Path, case: str) -> None:
    assert_named(plan, CASES[case])


def test_a_short_last_batch_is_valid_at_the_end_of_an_epoch_only(tmp_path: Path, analysis: Path) -> None:
    plan = build(analysis, tmp_path / "short", PlanConfig(chunk_size=16, k=2, global_batch=9, epochs=2)).path
    assert validate(plan).ok
    sizes = pq.read_table(plan / "steps.parquet").column("num_sequences").to_pylist()
    assert sizes == [9, 9, 2, 9, 9, 2]

    def change(rows: Rows) -> None:
        rows["steps"][3]["epoch"] = 0

    tamper(plan, change)
    [violation] = validate(plan).violations
    assert (violation.invariant, violation.step) == ("batch-sizes", 3)


def sequence_twice_in_a_step(rows: Rows) -> None:
    wholes = [piece for row in rows["chunks"] for piece in row["segments"] if row["group_id"] is None]
    wholes[0].update(wholes[1])


def test_a_dropped_last_batch_is_counted(tmp_path: Path, analysis: Path) -> None:
    """Two batches of nine; a sequence of the third, which is dropped, may not come instead of one of them twice."""
    config = PlanConfig(chunk_size=16, k=2, global_batch=9, last_batch="drop")
    plan = build(analysis, tmp_path / "dropped", config).path
    assert validate(plan).ok
    assert load_plan(plan).manifest["totals"]["num_dropped_sequences"] == 2
    change_manifest(plan, "totals", "num_dropped_sequences", value=3)
    [violation] = validate(plan).violations
    assert violation.invariant == "totals"
    assert "num_dropped_sequences = 3, counted 2" in violation.message
    tamper(plan, sequence_twice_in_a_step)
    assert "tokens-once" in {found.invariant for found in validate(plan).violations}


def test_a_selection_that_the_analysis_does_not_have_is_named(plan: Path) -> None:
    tamper(plan, lambda rows: None, mix={"elsewhere.jsonl": 2})
    [violation] = validate(plan).violations
    assert violation.invariant == "batch-sizes"
    assert "elsewhere.jsonl" in violation.message


def test_equal_chunks_are_checked_where_the_plan_promises_them(
    handmade_plan: Callable[..., tuple[Path, Path]], random_sequences: Callable[..., Any]
) -> None:
    """The second rank has a chunk less, unless one without loss fills up."""
    sequences = random_sequences([9, 8, 7])
    for fill, valid in (([], False), ([[]], True)):
        plan, _ = handmade_plan(sequences, [{0: [[(0, 0, 9)], [(1, 0, 8)]], 1: [[(2, 0, 7)], *fill]}], dp=2)
        tamper(plan, lambda rows: None, equal_chunks=False)
        assert validate(plan).ok
        tamper(plan, lambda rows: None, equal_chunks=True)
        result = validate(plan)
        assert result.ok == valid
        if not valid:
            [violation] = result.violations
            assert (violation.invariant, violation.step, violation.dp_rank) == ("equal-chunks", 0, 1)


def test_attention_is_kept_where_the_plan_may_keep_it_and_alike_on_all_ranks_of_a_block(
    plan: Path, shared_plan: Path
) -> None:
    def keep_all(rows: Rows) -> None:
        for row in rows["chunks"]:
            row["kept_attention"] = "" if row["keeps_activations"] else "host"

    def keep_one(rows: Rows) -> None:
        find(rows, keeps_activations=False, cp_size=8, dp_rank=1)["kept_attention"] = "host"

    tamper(plan, keep_all)
    assert validate(plan).ok
    tamper(plan, lambda rows: None, keep_attention="off")
    [found] = validate(plan).violations
    assert found.invariant == "kept-attention" and "keep_attention is off" in found.message
    tamper(shared_plan, keep_one)
    [found] = validate(shared_plan).violations
    assert found.invariant == "kept-attention" and 'is "host", but "gpu"' in found.message
