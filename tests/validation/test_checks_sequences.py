"""The invariants of sequences, broken on purpose, are found; also where a sequence occurs more than once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from chunkplan import PlanConfig, build, validate
from chunkplan.planfile.load import load_analysis
from tests.support.manifests import change_manifest
from tests.support.plan_rows import Case, Rows, assert_named, find, groups_of, long_group, part_of, tamper, whole


def last_tokens_missing(rows: Rows) -> None:
    chunk = long_group(rows)[-1]
    chunk["segments"][0]["end"] -= 1
    chunk["num_tokens"] -= 1


def token_twice(rows: Rows) -> None:
    chunk = long_group(rows)[1]
    chunk["segments"][0]["start"] -= 1
    chunk["segments"][0]["end"] -= 1
    chunk["prefix_tokens"] -= 1


def part_on_another_rank(rows: Rows) -> None:
    chunk = long_group(rows)[-1]
    other = find(rows, step=chunk["step"], dp_rank=1 - chunk["dp_rank"], group_id=None)
    other["segments"], chunk["segments"] = chunk["segments"], other["segments"]
    for row in (chunk, other):
        row["num_tokens"] = sum(segment["end"] - segment["start"] for segment in row["segments"])


def parts_out_of_order(rows: Rows) -> None:
    chunk, later = long_group(rows)[:2]
    chunk["group_index"], later["group_index"] = later["group_index"], chunk["group_index"]


def standalone_without_activations(rows: Rows) -> None:
    find(rows, group_id=None)["keeps_activations"] = False


def wrong_prefix(rows: Rows) -> None:
    long_group(rows)[2]["prefix_tokens"] = 0


CASES: dict[str, Case] = {
    "last tokens missing": ("tokens-once", last_tokens_missing, None),
    "a token twice": ("tokens-once", token_twice, None),
    "a part on another rank": ("one-step-one-rank", part_on_another_rank, None),
    "parts out of order": ("groups", parts_out_of_order, None),
    "a standalone chunk that keeps nothing": ("groups", standalone_without_activations, (0, 1, 0)),
    "a wrong prefix": ("prefix", wrong_prefix, None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_invariant_is_named(plan: Path, case: str) -> None:
    assert_named(plan, CASES[case])


def test_mixed_chunks_are_valid_and_hold_one_part_each(
    handmade_plan: Callable[..., tuple[Path, Path]], random_sequences: Callable[..., Any]
) -> None:
    sequences = random_sequences([20, 5, 6, 20])
    chunks = [[(0, 0, 16), (1, 0, 5)], [(0, 16, 20), (2, 0, 6)], [(3, 0, 16)], [(3, 16, 20)]]
    plan, _ = handmade_plan(sequences, [{0: chunks}])
    tamper(plan, lambda rows: None)
    assert validate(plan).ok

    def swap_tails(rows: Rows) -> None:
        """The last parts of both sequences, each in the group of the other."""
        one, other = (rows["chunks"][chunk]["segments"][0] for chunk in (1, 3))
        one["sequence_id"], other["sequence_id"] = other["sequence_id"], one["sequence_id"]

    tamper(plan, swap_tails)
    assert "groups" in {found.invariant for found in validate(plan).violations}
    tamper(plan, swap_tails)

    def join_tails(rows: Rows) -> None:
        """The last parts of both sequences in one chunk."""
        last, other = rows["chunks"][1], rows["chunks"][3]
        last["segments"][1], other["segments"][0] = other["segments"][0], last["segments"][1]

    tamper(plan, join_tails)
    violation = next(found for found in validate(plan).violations if found.invariant == "groups")
    assert (violation.step, violation.dp_rank, violation.chunk_id) == (0, 0, 1)
    assert "2 parts" in violation.message


@pytest.fixture
def twice(tmp_path: Path, analysis: Path) -> Path:
    """One step of one rank with every sequence twice: the steps of two epochs, one after the other."""
    config = PlanConfig(chunk_size=16, k=2, global_batch=20, pp=2, epochs=2, tail_sharing=True)
    plan = build(analysis, tmp_path / "twice", config).path

    def merge(rows: Rows) -> None:
        first, second = rows["steps"]
        for name in ("num_sequences", "num_tokens", "num_target_tokens", "num_chunks"):
            first[name] += second[name]
        rows["steps"] = [{**first, "optimal": False}]
        num_chunks = sum(row["step"] == 0 for row in rows["chunks"])
        num_groups = 1 + max(row["group_id"] or 0 for row in rows["chunks"])
        for row in rows["chunks"][num_chunks:]:
            row["step"] = 0
            row["chunk_id"] += num_chunks
            row["group_id"] = None if row["group_id"] is None else row["group_id"] + num_groups
        for earlier, later in zip(rows["schedule"][:2], rows["schedule"][2:], strict=True):
            moved = [{**action, "chunk_id": action["chunk_id"] + num_chunks} for action in later["actions"]]
            earlier["actions"] += moved
        del rows["schedule"][2:]

    tamper(plan, merge, epochs=1, global_batch=40, mix={"d.jsonl": 2})
    [step] = pq.read_table(plan / "steps.parquet").to_pylist()
    change_manifest(plan, "totals", "num_steps", value=1)
    for name in ("predicted_us", "lower_bound_us"):
        change_manifest(plan, "predictions", name, value=step[name])
    return plan


def test_a_sequence_may_occur_twice_in_an_epoch_even_in_one_rank(twice: Path) -> None:
    assert validate(twice).violations == ()
    tamper(twice, lambda rows: None, mix={"d.jsonl": 3})
    assert [found.invariant for found in validate(twice).violations] == ["batch-sizes"]


def test_an_occurrence_too_many_is_found_where_it_is(twice: Path) -> None:
    """Sequences 4 and 5 both have 7 tokens: one occurs three times, the other once, and all counts are right."""

    def change(rows: Rows) -> None:
        whole(rows, 4)[1]["sequence_id"] = 5

    tamper(twice, change)
    [violation] = validate(twice).violations
    assert violation.invariant == "tokens-once"
    rows = pq.read_table(twice / "chunks.parquet").to_pylist()
    places = [
        (row["dp_rank"], row["chunk_id"]) for row in rows if any(piece["sequence_id"] == 5 for piece in row["segments"])
    ]
    assert (violation.dp_rank, violation.chunk_id) == places[-1]


def test_occurrences_may_be_cut_at_different_tokens_but_not_mixed(twice: Path, analysis: Path) -> None:
    """The last parts of two groups of the 40-token sequence: [32, 40) in one, [31, 40) in the other."""
    target = load_analysis(analysis).tokens()(3)[1]

    def cut_earlier(rows: Rows) -> None:
        *_, before, last = groups_of(rows, 3)[1]
        part_of(before, 3)["end"] = part_of(last, 3)["start"] = last["prefix_tokens"] = 31
        for row, more in ((before, -1), (last, 1)):
            row["num_tokens"] += more
            row["num_target_tokens"] += more * int(target[32])

    tamper(twice, cut_earlier, chunk_size=17)
    assert validate(twice).violations == ()

    def swap_tails(rows: Rows) -> None:
        one, other = (group[-1] for group in groups_of(rows, 3))
        for name in ("segments", "num_tokens", "num_target_tokens", "prefix_tokens"):
            one[name], other[name] = other[name], one[name]

    tamper(twice, swap_tails)
    assert [found.invariant for found in validate(twice).violations] == ["groups"]


def test_an_occurrence_that_lacks_its_end_is_found_beside_a_complete_one(twice: Path) -> None:
    def shorten(rows: Rows) -> None:
        last = groups_of(rows, 8)[1][-1]
        part_of(last, 8)["end"] -= 1
        last["num_tokens"] -= 1

    tamper(twice, shorten)
    [violation] = validate(twice).violations
    last = groups_of({"chunks": pq.read_table(twice / "chunks.parquet").to_pylist()}, 8)[1][-1]
    assert (violation.invariant, violation.chunk_id) == ("tokens-once", last["chunk_id"])


def test_every_epoch_has_its_own_occurrences(tmp_path: Path, analysis: Path) -> None:
    """Sequence 5 twice in the first epoch and 4 not at all, the other way round in the second."""
    config = PlanConfig(chunk_size=16, k=2, global_batch=10, epochs=2)
    plan = build(analysis, tmp_path / "epochs", config).path
    assert validate(plan).ok

    def change(rows: Rows) -> None:
        one, other = whole(rows, 4)[0], whole(rows, 5)[1]
        one["sequence_id"], other["sequence_id"] = 5, 4

    tamper(plan, change)
    [violation] = [found for found in validate(plan).violations if found.invariant == "tokens-once"]
    assert violation.count == 2
    assert violation.step in (0, 1)


def test_an_epoch_does_not_lend_a_part_to_another(tmp_path: Path, analysis: Path) -> None:
    """The last part of a sequence comes twice in the first epoch and not in the second."""
    config = PlanConfig(chunk_size=16, k=2, global_batch=10, epochs=2)
    plan = build(analysis, tmp_path / "epochs", config).path

    def change(rows: Rows) -> None:
        first, second = (group[-1] for group in groups_of(rows, 8))
        first["segments"].append(part_of(second, 8))
        second["segments"].remove(part_of(second, 8))

    tamper(plan, change)
    assert "tokens-once" in {found.invariant for found in validate(plan).violations}
