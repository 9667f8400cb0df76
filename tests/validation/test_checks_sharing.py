"""Blocks of ranks, their slices and their order, broken on purpose, are found under their names and at their places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chunkplan import validate
from tests.support.plan_rows import Rows, tamper
from tests.support.shared_plans import LENGTHS, at, build_blocks


def set_segments(chunk: dict[str, Any], *slices: tuple[int, int, int]) -> None:
    """Let a chunk hold these tokens; without token ids every token but the first of a sequence is a target."""
    chunk["segments"] = [{"sequence_id": i, "start": start, "end": end} for i, start, end in slices]
    chunk["num_tokens"] = sum(end - start for _, start, end in slices)
    chunk["num_target_tokens"] = sum(end - start - (end == LENGTHS[i]) for i, start, end in slices)
    if chunk["cp_size"] == 1:
        chunk["cp_tokens"] = chunk["num_tokens"]


def three_ranks(rows: Rows) -> None:
    at(rows, 4, 5)["cp_size"] = 3


def block_not_aligned(rows: Rows) -> None:
    at(rows, 5, 5)["cp_first_rank"] = 5


def block_of_others(rows: Rows) -> None:
    at(rows, 4, 5)["cp_first_rank"] = 6


def heads_that_do_not_divide(rows: Rows) -> None:
    at(rows, 2, 0)["cp_heads"] = 3


def more_heads_than_the_model_has(rows: Rows) -> None:
    for rank in range(8):
        at(rows, rank, 0)["cp_heads"] = 8


def alone_with_others(rows: Rows) -> None:
    at(rows, 3, 7)["cp_first_rank"] = 2


def rows_that_differ(rows: Rows) -> None:
    at(rows, 5, 6)["group_index"] = 0


def rank_that_has_it_alone(rows: Rows) -> None:
    chunk = at(rows, 5, 6)
    chunk.update(cp_first_rank=5, cp_size=1, cp_tokens=chunk["num_tokens"])


def rank_without_such_a_chunk(rows: Rows) -> None:
    rows["chunks"].remove(at(rows, 6, 7))
    at(rows, 7, 7).update(group_id=9, cp_first_rank=6, cp_size=2)


def no_group(rows: Rows) -> None:
    at(rows, 4, 5)["group_id"] = at(rows, 5, 5)["group_id"] = None


def slices_of_another_size(rows: Rows) -> None:
    """A token goes from one rank to its neighbour: all are there once."""
    set_segments(at(rows, 4, 5), (8, 0, 7), (8, 18, 25))
    set_segments(at(rows, 5, 5), (8, 7, 12), (8, 12, 18))


def slices_of_another_rank(rows: Rows) -> None:
    one, other = at(rows, 6, 6), at(rows, 7, 6)
    slices = [[tuple(piece.values()) for piece in chunk["segments"]] for chunk in (one, other)]
    set_segments(one, *slices[1])
    set_segments(other, *slices[0])


def slices_of_a_rank_out_of_order(rows: Rows) -> None:
    at(rows, 6, 6)["segments"].reverse()


def something_else_in_a_shared_chunk(rows: Rows) -> None:
    set_segments(at(rows, 2, 7), (13, 0, 9))
    set_segments(at(rows, 7, 5), (22, 4, 9), (22, 9, 13), (6, 0, 2))


def slices_without_tokens(rows: Rows) -> None:
    """Seven tokens for four ranks of two slices each: some have none in one of them."""
    for rank in range(4):
        slices = [(3, 7 * i // 8, 7 * (i + 1) // 8) for i in (rank, 7 - rank)]
        set_segments(at(rows, rank, 5), *slices)
        at(rows, rank, 5)["cp_tokens"] = 7


def renumber(rows: Rows, rank: int, one: int, other: int) -> None:
    """Two chunks of a rank take each other's number, in what is done with them too."""
    actions = [action for row in rows["schedule"] if row["dp_rank"] == rank for action in row["actions"]]
    for named in (*(row for row in rows["chunks"] if row["dp_rank"] == rank), *actions):
        named["chunk_id"] = {one: other, other: one}.get(named["chunk_id"], named["chunk_id"])
    rows["chunks"].sort(key=lambda row: (row["dp_rank"], row["chunk_id"]))


def shared_chunk_last(rows: Rows) -> None:
    for rank in (4, 5):
        renumber(rows, rank, 6, 7)


def groups_descend(rows: Rows) -> None:
    for row in rows["chunks"]:
        row["group_id"] = {0: 1, 1: 0}.get(row["group_id"], row["group_id"])


def group_id_twice(rows: Rows) -> None:
    for row in rows["chunks"]:
        row["group_id"] = {4: 3}.get(row["group_id"], row["group_id"])


def part_on_another_block(rows: Rows) -> None:
    """The second halves of sequences 8 and 22, each where the other one belongs."""
    for one, other in ((at(rows, 4, 6), at(rows, 6, 6)), (at(rows, 5, 6), at(rows, 7, 6))):
        for name in ("segments", "num_tokens", "num_target_tokens", "prefix_tokens", "cp_tokens"):
            one[name], other[name] = other[name], one[name]


def parts_out_of_order(rows: Rows) -> None:
    for rank in (4, 5):
        at(rows, rank, 5)["group_index"], at(rows, rank, 6)["group_index"] = 1, 0


def wrong_prefix(rows: Rows) -> None:
    for rank in (4, 5):
        at(rows, rank, 6)["prefix_tokens"] = 24


def wrong_targets(rows: Rows) -> None:
    at(rows, 5, 6)["num_target_tokens"] += 1


def last_token_missing(rows: Rows) -> None:
    """The slices are those of a chunk that ends a token too early."""
    set_segments(at(rows, 6, 6), (22, 18, 22), (22, 31, 36))
    set_segments(at(rows, 7, 6), (22, 22, 27), (22, 27, 31))
    for rank in (6, 7):
        at(rows, rank, 6)["cp_tokens"] = 18


def whole_chunks_counted_once(rows: Rows) -> None:
    """As if a chunk that ranks share were one chunk of the step."""
    rows["steps"][0]["num_chunks"] -= sum(row["cp_first_rank"] != row["dp_rank"] for row in rows["chunks"])


def bound_above_what_there_is(rows: Rows) -> None:
    rows["steps"][0]["packing_lower_bound"] = rows["steps"][0]["num_chunks"] + 1


Damage = tuple[str, Callable[[Rows], None], tuple[int, ...], str]

#: What is broken, by which change, at which rank and chunk, and what the message says of it.
CASES: dict[str, Damage] = {
    "three ranks": ("cp-groups", three_ranks, (4, 5), "3 ranks share it, expected one of 1, 2, 4, 8"),
    "a block that is not aligned": ("cp-groups", block_not_aligned, (5, 5), "2 ranks from rank 5 on, expected"),
    "a block of other ranks": (
        "cp-groups",
        block_of_others,
        (4, 5),
        "expected the aligned block of the rank, from 4 on",
    ),
    "heads that do not divide": ("cp-groups", heads_that_do_not_divide, (2, 0), "3 of 8 ranks share heads"),
    "more heads than the model has": (
        *("cp-groups", more_heads_than_the_model_has, (0, 0)),
        "8 ranks share heads, and Qwen2.5-7B has 4 key and value heads a GPU",
    ),
    "alone, with others": ("cp-groups", alone_with_others, (3, 7), "cp_size is 1"),
    "rows that differ": ("cp-groups", rows_that_differ, (5, 6), "group_index is 0, but 1 on rank 4 of the same block"),
    "a rank that has it alone": (
        "cp-groups",
        rank_that_has_it_alone,
        (4, 6),
        "1 of the 2 ranks from rank 4 on have it",
    ),
    "a rank without it": (
        "cp-groups",
        rank_without_such_a_chunk,
        (7, 7),
        "rank 6, of the same block, has no such chunk",
    ),
    "of no group": ("cp-groups", no_group, (4, 5), "shared, but of no group"),
    "another size": (
        *("cp-slices", slices_of_another_size, (4, 5)),
        "holds [0, 7) of sequence 8 and [18, 25) of sequence 8, expected [0, 6) and [18, 25) of sequence 8",
    ),
    "another rank's": ("cp-slices", slices_of_another_rank, (6, 6), "expected"),
    "slices out of order": ("cp-slices", slices_of_a_rank_out_of_order, (6, 6), "expected"),
    "something else": ("cp-slices", something_else_in_a_shared_chunk, (7, 5), "and [0, 2) of sequence 6, expected"),
    "no tokens": ("cp-slices", slices_without_tokens, (0, 5), "expected [0, 0) and [6, 7) of sequence 3"),
    "a shared chunk last": ("cp-order", shared_chunk_last, (4, 7), "after one that the rank has to itself"),
    "groups that descend": ("cp-order", groups_descend, (0, 3), "group 0 after group 1"),
    "a group_id twice": ("cp-order", group_id_twice, (6, 5), "group 3 is that of other ranks already, rank 4 among"),
    "another block": ("one-step-one-rank", part_on_another_block, (4, 5), "whose other parts run elsewhere"),
    "parts out of order": ("groups", parts_out_of_order, (4, 5), "out of order"),
    "a wrong prefix": ("prefix", wrong_prefix, (4, 6), "prefix_tokens is not 25"),
    "wrong targets": ("targets", wrong_targets, (5, 6), "target tokens stated"),
    "a token missing": ("tokens-once", last_token_missing, (), "missing or come twice"),
    "whole chunks counted": ("totals", whole_chunks_counted_once, (), "num_chunks is"),
    "a bound too high": ("totals", bound_above_what_there_is, (), "lower bounds"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_invariant_is_named_and_its_place(shared_plan: Path, case: str) -> None:
    invariant, change, place, words = CASES[case]
    tamper(shared_plan, change)
    [violation] = [found for found in validate(shared_plan).violations if found.invariant == invariant]
    assert words in violation.message
    if place:
        assert (violation.step, violation.dp_rank, violation.chunk_id) == (0, *place)


ALONE = ["another size", "a shared chunk last", "groups that descend", "a wrong prefix"]


@pytest.mark.parametrize("case", ALONE)
def test_what_is_broken_alone_is_named_alone(shared_plan: Path, case: str) -> None:
    tamper(shared_plan, CASES[case][1])
    assert {found.invariant for found in validate(shared_plan).violations} == {CASES[case][0]}


@pytest.mark.parametrize(
    ("invariant", "config"),
    [
        ("holders", {"k": 1}),
        ("chunk-size", {"chunk_size": 12}),
        ("batch-sizes", {"global_batch": 22}),
        ("memory", {"memory_tokens": 20}),
        ("cp-groups", {"cp": 4}),
    ],
)
def test_rows_that_the_configuration_does_not_allow_are_found(
    shared_plan: Path, invariant: str, config: dict[str, Any]
) -> None:
    tamper(shared_plan, lambda rows: None, **config)
    assert invariant in {found.invariant for found in validate(shared_plan).violations}


@pytest.mark.parametrize("name", ["cp_first_rank", "cp_size", "cp_heads", "cp_tokens", "group_id"])
@pytest.mark.parametrize("value", [-(2**31), -1, 0, 2**31 - 1])
def test_no_number_makes_a_plan_valid_or_a_check_crash(shared_plan: Path, name: str, value: int) -> None:
    tamper(shared_plan, lambda rows: at(rows, 5, 5).update({name: value}))
    assert "cp-groups" in {found.invariant for found in validate(shared_plan).violations}


def test_a_group_of_one_rank_with_a_lower_id_than_a_shared_one_is_found(tmp_path: Path) -> None:
    """Of two ranks that share the longest sequence alone; of the others the long ones are cut, each on a rank."""
    plan = build_blocks(tmp_path, {300: (0, 2)}, dp=2, k=1).path
    assert validate(plan).ok
    seen: list[int] = []

    def exchange(rows: Rows) -> None:
        shared, own = (
            max(
                row["group_id"] for row in rows["chunks"] if row["group_id"] is not None and (row["cp_size"] > 1) == is_
            )
            for is_ in (True, False)
        )
        seen.extend((shared, own))
        for row in rows["chunks"]:
            row["group_id"] = {shared: own, own: shared}.get(row["group_id"], row["group_id"])

    tamper(plan, exchange)
    [violation] = validate(plan).violations
    assert violation.invariant == "cp-order"
    assert f"of the rank alone, but group {seen[1]} is shared" in violation.message
