"""Trees broken on purpose are found under the names of what is wrong, and at their places."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chunkplan import validate
from tests.support.plan_rows import Rows, actions_of, position, tamper
from tests.support.trees import build_trees, rollouts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of one tree in a group of more than three chunks, two of the prompt; of two pairs, and of sequence 10."""
    folder = tmp_path_factory.mktemp("trees")
    random = np.random.default_rng(0)
    alone = [(np.arange(3), np.arange(3) > 0)]
    build_trees(folder, rollouts(random, [120], 6, 60) + rollouts(random, [40, 36], 2, 8) + alone, k=3)
    return folder


@pytest.fixture
def plan(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy") / "plan"


def tree(rows: Rows) -> list[dict[str, Any]]:
    return [row for row in rows["chunks"] if row["group_size"] > 3]


def leaf(rows: Rows) -> dict[str, Any]:
    """The last chunk of the tree, on which none depends."""
    return tree(rows)[-1]


def a_parent_without_its_token(rows: Rows) -> None:
    child = rows["prefixes"][0]
    child["prefix_of"] = next(row["sequence_id"] for row in rows["prefixes"] if row is not child)


def another_prompt(rows: Rows) -> None:
    others = {row["prefix_of"] for row in rows["prefixes"]} - {rows["prefixes"][0]["prefix_of"]}
    rows["prefixes"][0]["prefix_of"] = min(others)


def more_than_is_equal(rows: Rows) -> None:
    rows["prefixes"][0]["prefix_tokens"] += 1
    for row in rows["chunks"]:
        for segment in row["segments"]:
            if segment["sequence_id"] == rows["prefixes"][0]["sequence_id"]:
                segment["start"] += 1
                row["num_tokens"] -= 1


def a_loop(rows: Rows) -> None:
    child = rows["prefixes"][0]
    rows["prefixes"].append({**child, "sequence_id": child["prefix_of"], "prefix_of": child["sequence_id"]})
    rows["prefixes"].sort(key=lambda row: row["sequence_id"])


def longer_than_the_parent(rows: Rows) -> None:
    rows["prefixes"][0]["prefix_tokens"] = 10_000


def of_another_step(rows: Rows) -> None:
    rows["prefixes"][-1]["step"] = 1


def in_no_order(rows: Rows) -> None:
    rows["prefixes"].reverse()


def unknown(rows: Rows) -> None:
    rows["prefixes"][-1]["sequence_id"] = 1000


def run_from_the_first_token(rows: Rows) -> None:
    """The row is gone, and the prompt of the sequence nowhere."""
    del rows["prefixes"][0]


def a_token_twice(rows: Rows) -> None:
    segment = next(each for each in leaf(rows)["segments"] if each["start"] == 119)
    segment["start"] -= 1
    leaf(rows)["num_tokens"] += 1


def a_token_missing(rows: Rows) -> None:
    segment = next(each for each in leaf(rows)["segments"] if each["start"] == 119)
    segment["end"] -= 1
    leaf(rows)["num_tokens"] -= 1


def branch_before_the_prompt(rows: Rows) -> None:
    """The chunks' contents are exchanged, not what they say of themselves."""
    first, last = tree(rows)[0], leaf(rows)
    for name in ("segments", "num_tokens", "num_target_tokens"):
        first[name], last[name] = last[name], first[name]


def on_another_chunk(rows: Rows) -> None:
    """A branch of the large tree in a standalone chunk."""
    segment = leaf(rows)["segments"].pop()
    leaf(rows)["num_tokens"] -= segment["end"] - segment["start"]
    other = min((row for row in rows["chunks"] if row["group_id"] is None), key=lambda row: row["num_tokens"])
    other["segments"].append(segment)
    other["num_tokens"] += segment["end"] - segment["start"]


def with_another_sequence(rows: Rows) -> None:
    other = next(row for row in rows["chunks"] if any(each["sequence_id"] == 10 for each in row["segments"]))
    for row, sign in ((leaf(rows), 1), (other, -1)):
        row["num_tokens"] += 3 * sign
        row["num_target_tokens"] += 2 * sign
    segment = next(each for each in other["segments"] if each["sequence_id"] == 10)
    other["segments"].remove(segment)
    leaf(rows)["segments"].append(segment)


def a_leaf_without_activations(rows: Rows) -> None:
    leaf(rows)["keeps_activations"] = False


def no_dependents(rows: Rows) -> None:
    tree(rows)[1]["last_dependent"] = 1


def prefix_of_a_chain(rows: Rows) -> None:
    leaf(rows)["prefix_tokens"] = 119


def prompt_backward_first(rows: Rows) -> None:
    actions, (first, second) = actions_of(rows, leaf(rows)), tree(rows)[:2]
    places = [position(actions, "backward", chunk["chunk_id"]) for chunk in (second, first)]
    actions[places[0]], actions[places[1]] = actions[places[1]], actions[places[0]]


def leaves_backward_late(rows: Rows) -> None:
    actions, leaves = actions_of(rows, leaf(rows)), tree(rows)[-2:]
    backward = actions.pop(position(actions, "backward", leaves[0]["chunk_id"]))
    actions.insert(position(actions, "backward", leaves[1]["chunk_id"]) + 1, backward)


def run_again_by_all(rows: Rows) -> None:
    rows["steps"][0]["num_tokens"] = sum(row["num_tokens"] for row in rows["chunks"])


CASES = [
    ("prefixes", another_prompt),
    ("prefixes", a_parent_without_its_token),
    ("prefixes", more_than_is_equal),
    ("prefixes", a_loop),
    ("prefixes", longer_than_the_parent),
    ("prefixes", of_another_step),
    ("prefixes", in_no_order),
    ("prefixes", unknown),
    ("batch-sizes", run_from_the_first_token),
    ("prefixes", a_token_twice),
    ("tokens-once", a_token_missing),
    ("groups", branch_before_the_prompt),
    ("groups", on_another_chunk),
    ("groups", with_another_sequence),
    ("groups", a_leaf_without_activations),
    ("last-dependent", no_dependents),
    ("prefix", prefix_of_a_chain),
    ("part-order", prompt_backward_first),
    ("part-order", leaves_backward_late),
    ("totals", run_again_by_all),
]


def test_a_plan_with_trees_is_valid_and_runs_shared_tokens_once(folder: Path) -> None:
    assert validate(folder / "plan").ok


@pytest.mark.parametrize(("invariant", "change"), CASES, ids=[change.__name__ for _, change in CASES])
def test_a_broken_tree_is_found(invariant: str, change: Any, plan: Path) -> None:
    tamper(plan, change)
    assert [found.invariant for found in validate(plan).violations][:1] == [invariant]


def test_more_holders_than_k_less_one_are_found_on_a_tree(plan: Path) -> None:
    tamper(plan, lambda rows: None, k=2)
    [found] = validate(plan).violations
    assert (found.invariant, found.message) == ("holders", "stage 0: 3 chunks hold activations, K is 2")


def test_branches_that_differ_in_what_they_share_are_named_with_their_records(plan: Path) -> None:
    tamper(plan, more_than_is_equal)
    found = validate(plan).violations[0]
    assert "but their tokens differ at 120 (rollouts.jsonl:2 and rollouts.jsonl:1)" in found.message
