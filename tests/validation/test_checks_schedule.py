"""The invariants of a schedule, broken on purpose, are found under their names and at their places."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from chunkplan import validate
from chunkplan.validation import schedule_columns
from tests.support.plan_rows import (
    SCHEMAS,
    Case,
    Rows,
    actions_of,
    assert_named,
    find,
    long_group,
    most_tokens_held,
    position,
    tamper,
)


def recompute_too_early(rows: Rows) -> None:
    """The recompute comes before the backward that is due before it: activations would lie about for longer."""
    chunk = long_group(rows)[0]
    for stage in (0, 1):
        actions = actions_of(rows, chunk, stage)
        place = position(actions, "recompute", chunk["chunk_id"])
        actions.insert(place - 1, actions.pop(place))


def recompute_at_the_end(rows: Rows) -> None:
    chunk = long_group(rows)[0]
    for stage in (0, 1):
        actions_of(rows, chunk, stage).append({"op": "recompute", "chunk_id": chunk["chunk_id"], "virtual_stage": 0})


def gradients_crossed(rows: Rows) -> None:
    """The last stage forwards all first, then gives gradients back in another order than the first stage takes them."""
    for stage, order in ((0, (0, 1)), (1, (1, 0))):
        actions = actions_of(rows, find(rows, group_id=None), stage)
        backwards = [action for action in actions if action["op"] == "backward" and action["chunk_id"] in (0, 1)]
        for action in backwards:
            actions.remove(action)
        place = 1 + max(position(actions, "forward", chunk_id) for chunk_id in (0, 1))
        actions[place:place] = [next(a for a in backwards if a["chunk_id"] == chunk_id) for chunk_id in order]


def unknown_op(rows: Rows) -> None:
    actions_of(rows, rows["chunks"][0])[0]["op"] = "fly"


def virtual_stage_beyond_reason(rows: Rows) -> None:
    actions_of(rows, rows["chunks"][0])[0]["virtual_stage"] = 10**9


def stage_missing(rows: Rows) -> None:
    rows["schedule"] = [row for row in rows["schedule"] if (row["step"], row["dp_rank"], row["stage"]) != (1, 1, 0)]


def stage_of_no_rank(rows: Rows) -> None:
    """One row too few for rank 1 and one for a rank that cannot be: the number of rows is right."""
    row = next(row for row in rows["schedule"] if (row["step"], row["dp_rank"], row["stage"]) == (1, 1, 0))
    row["dp_rank"] = -1


def stage_too_many(rows: Rows) -> None:
    """Nothing is missing, but the last rank has a third stage."""
    rows["schedule"].append({**rows["schedule"][-1], "stage": 2})


def stage_twice(rows: Rows) -> None:
    rows["schedule"].append(rows["schedule"][-1])


def step_too_many_in_schedule(rows: Rows) -> None:
    rows["schedule"].append({**rows["schedule"][-1], "step": 2})


def recompute_of_another_chunk(rows: Rows) -> None:
    first, second = (chunk["chunk_id"] for chunk in long_group(rows)[:2])
    for stage in (0, 1):
        for action in actions_of(rows, long_group(rows)[0], stage):
            if action["op"] == "recompute":
                action["chunk_id"] = first + second - action["chunk_id"]


def step_missing_in_schedule(rows: Rows) -> None:
    rows["schedule"] = [row for row in rows["schedule"] if row["step"] != 1]


def backward_missing(rows: Rows) -> None:
    actions = actions_of(rows, rows["chunks"][0])
    del actions[position(actions, "backward", 0)]


def recompute_missing(rows: Rows) -> None:
    """The first erratum of the pseudocode in circulation: other chunks than the last K keep their activations."""
    chunk = long_group(rows)[0]
    for stage in (0, 1):
        actions = actions_of(rows, chunk, stage)
        del actions[position(actions, "recompute", chunk["chunk_id"])]


def ascending_recompute(rows: Rows) -> None:
    """The second erratum: recompute, and so backward, in ascending order."""
    first, second = (chunk["chunk_id"] for chunk in long_group(rows)[:2])
    for stage in (0, 1):
        for action in actions_of(rows, long_group(rows)[0], stage):
            if action["op"] in ("recompute", "backward") and action["chunk_id"] in (first, second):
                action["chunk_id"] = first + second - action["chunk_id"]


def links_crossed(rows: Rows) -> None:
    actions = actions_of(rows, find(rows, group_id=None), stage=1)
    one, other = (action for action in actions if action["op"] == "forward" and action["chunk_id"] in (0, 1))
    one["chunk_id"], other["chunk_id"] = other["chunk_id"], one["chunk_id"]
    one, other = (action for action in actions if action["op"] == "backward" and action["chunk_id"] in (0, 1))
    one["chunk_id"], other["chunk_id"] = other["chunk_id"], one["chunk_id"]


CASES: dict[str, Case] = {
    "a recompute too early": ("recompute", recompute_too_early, (0, 0, 1)),
    "a recompute at the end": ("recompute", recompute_at_the_end, None),
    "gradients in different orders": ("links", gradients_crossed, (0, 1, None)),
    "an unknown op": ("actions", unknown_op, (0, 0, 0)),
    "a virtual stage beyond reason": ("actions", virtual_stage_beyond_reason, (0, 0, 0)),
    "a stage without actions": ("schedule-rows", stage_missing, (1, 1, None)),
    "actions of a rank that cannot be": ("schedule-rows", stage_of_no_rank, (1, -1, None)),
    "a stage too many": ("schedule-rows", stage_too_many, (1, 1, None)),
    "a stage twice": ("schedule-rows", stage_twice, None),
    "actions of a step that is not there": ("schedule-rows", step_too_many_in_schedule, None),
    "a recompute of another chunk": ("recompute", recompute_of_another_chunk, (0, 0, 1)),
    "a step without actions": ("schedule-rows", step_missing_in_schedule, None),
    "a backward missing": ("actions", backward_missing, (0, 0, 0)),
    "a recompute missing": ("recompute", recompute_missing, None),
    "recompute ascending": ("part-order", ascending_recompute, None),
    "links in different orders": ("links", links_crossed, (0, 1, None)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_invariant_is_named(plan: Path, case: str) -> None:
    assert_named(plan, CASES[case])


def deadlock(rows: Rows) -> None:
    """Stage 0 wants chunk 0 back before it forwards chunk 1; stage 1 wants chunk 1 before it gives chunk 0 back."""
    first, last = (actions_of(rows, find(rows, group_id=None), stage) for stage in (0, 1))
    first.insert(1, first.pop(position(first, "backward", 0)))
    last.insert(position(last, "forward", 1), last.pop(position(last, "backward", 0)))


def test_more_than_k_holders_are_found(plan: Path) -> None:
    """The chunks kept are those of K = 2; a plan that says K = 1 holds too many."""
    tamper(plan, lambda rows: None, k=1)
    assert [violation.invariant for violation in validate(plan).violations] == ["holders"]


def test_a_deadlock_is_found(plan: Path) -> None:
    tamper(plan, deadlock)
    [violation] = validate(plan).violations
    assert (violation.invariant, violation.step, violation.dp_rank) == ("acyclic", 0, 1)


def test_halves_of_a_backward_come_input_first(plan: Path) -> None:
    def halve(rows: Rows, order: tuple[str, str]) -> None:
        for row in rows["schedule"]:
            row["actions"] = [
                {**action, "op": op}
                for action in row["actions"]
                for op in (order if action["op"] == "backward" else (action["op"],))
            ]

    saved = {path: path.read_bytes() for path in plan.iterdir()}
    tamper(plan, lambda rows: halve(rows, ("backward_input", "backward_weight")))
    assert validate(plan).ok
    for path, content in saved.items():
        path.write_bytes(content)
    tamper(plan, lambda rows: halve(rows, ("backward_weight", "backward_input")))
    [violation] = validate(plan).violations
    assert (violation.invariant, violation.step, violation.dp_rank, violation.chunk_id) == ("actions", 0, 0, 0)


def test_a_memory_bound_is_held(plan: Path) -> None:
    """To the token."""
    rows = {name: pq.read_table(plan / f"{name}.parquet").to_pylist() for name in SCHEMAS}
    most = max(most_tokens_held(rows, step["step"]) for step in rows["steps"])
    tamper(plan, lambda rows: None, memory_tokens=most - 1)
    [violation] = validate(plan).violations
    assert violation.invariant == "memory"
    assert f"holds {most} tokens" in violation.message
    tamper(plan, lambda rows: None, memory_tokens=most)
    assert validate(plan).ok


def test_every_rank_is_checked_whatever_block_it_falls_in(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one rank, and of a few; two ranks are broken, each in its own way."""

    def change(rows: Rows) -> None:
        last = rows["chunks"][-1]
        for stage in (0, 1):
            actions_of(rows, last, stage).reverse()
        recompute_missing(rows)

    tamper(plan, change)
    expected = validate(plan).violations
    assert (expected[0].invariant, expected[0].step, expected[0].dp_rank) == ("actions", 1, 1)
    assert "recompute" in {found.invariant for found in expected}
    for rows in (1, 50):
        monkeypatch.setattr(schedule_columns, "BLOCK_ROWS", rows)
        assert validate(plan).violations == expected
