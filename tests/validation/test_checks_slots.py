"""Slots that processes cannot walk through are found, whatever else a plan is; those of a plan hold on any pipeline."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from chunkplan import PlanConfig, build, validate
from tests.support.plan_rows import Rows, tamper


def rows_of(rows: Rows, step: int = 1, stage: int = 0) -> list[dict[str, Any]]:
    """Those of all ranks of a stage of a step."""
    return [row for row in rows["schedule"] if (row["step"], row["stage"]) == (step, stage)]


def no_slot(rows: Rows) -> None:
    rows_of(rows)[0]["slots"].pop()


def slot_too_many(rows: Rows) -> None:
    row = rows_of(rows)[0]
    row["slots"].append(row["slots"][-1] + 1)


def negative(rows: Rows) -> None:
    rows_of(rows)[0]["slots"][0] = -1


def twice(rows: Rows) -> None:
    slots = rows_of(rows)[0]["slots"]
    slots[3] = slots[2]


def descending(rows: Rows) -> None:
    slots = rows_of(rows)[0]["slots"]
    slots[2], slots[3] = slots[3], slots[2]


def unused(rows: Rows) -> None:
    for row in rows_of(rows):
        row["slots"] = [slot + (slot > 2) for slot in row["slots"]]


def not_from_zero(rows: Rows) -> None:
    for row in rows_of(rows):
        row["slots"] = [slot + 1 for slot in row["slots"]]


def beyond_reason(rows: Rows) -> None:
    rows_of(rows)[0]["slots"][-1] = 2**31 - 1


def waits_for_what_waits(rows: Rows) -> None:
    """On the last stage the second rank goes first, on the first one the first: in rows and columns all is well."""
    for stage in (0, 1):
        ranks, number = rows_of(rows, stage=stage), count()
        for row in ranks if stage == 0 else ranks[::-1]:
            row["slots"] = [next(number) for _ in row["actions"]]


BROKEN = [
    no_slot,
    slot_too_many,
    negative,
    twice,
    descending,
    unused,
    not_from_zero,
    beyond_reason,
    waits_for_what_waits,
]


@pytest.mark.parametrize("change", BROKEN)
def test_slots_that_nobody_can_walk_through_are_found(plan: Path, change: Callable[[Rows], None]) -> None:
    tamper(plan, change)
    [found] = validate(plan).violations
    assert (found.invariant, found.step) == ("slots", 1)


@pytest.mark.parametrize("change", [no_slot, slot_too_many])
def test_of_a_row_with_too_few_or_too_many_slots_both_numbers_are_said(
    plan: Path, change: Callable[[Rows], None]
) -> None:
    actions = len(rows_of({"schedule": _all_rows(plan)})[0]["actions"])
    tamper(plan, change)
    [found] = validate(plan).violations
    slots = actions + (1 if change is slot_too_many else -1)
    assert found.message == f"stage 0 has {slots} slots for {actions} actions"
    assert (found.dp_rank, found.chunk_id) == (0, None)


def test_ops_that_fetch_otherwise_are_in_no_slot_together(tmp_path: Path, analysis: Path) -> None:
    """On one stage, of which the ranks change places: forwards and backwards meet."""
    plan = build(analysis, tmp_path / "one", PlanConfig(chunk_size=16, k=2, global_batch=10, dp=2, cp="off")).path

    def change(rows: Rows) -> None:
        for row in rows_of(rows):
            row["slots"] = list(range(len(row["actions"])))

    first = [[action["op"] for action in row["actions"]] for row in rows_of({"schedule": _all_rows(plan)})]
    assert any(one != other for one, other in zip(*first, strict=False))
    tamper(plan, change)
    [found] = validate(plan).violations
    assert (found.invariant, found.step) == ("slots", 1)
    assert "in which another rank does" in found.message


def test_ranks_that_share_a_chunk_are_in_one_slot(shared_plan: Path) -> None:
    def apart(rows: Rows) -> None:
        """Every rank is in slots of its own."""
        for stage in {row["stage"] for row in rows["schedule"]}:
            number = count()
            for row in rows_of(rows, 0, stage):
                row["slots"] = [next(number) for _ in row["actions"]]

    tamper(shared_plan, apart)
    [found] = validate(shared_plan).violations
    assert (found.invariant, found.step) == ("slots", 0)
    assert "shares it" in found.message


def test_slots_of_another_order_of_play_hold(plan: Path) -> None:
    """One rank after another, on both stages alike: slow, but nothing deadlocks."""

    def change(rows: Rows) -> None:
        for stage in (0, 1):
            number = count()
            for row in rows_of(rows, stage=stage):
                row["slots"] = [next(number) for _ in row["actions"]]

    tamper(plan, change)
    assert validate(plan).ok


@pytest.mark.parametrize(
    "config",
    [
        {"dp": 4},
        {"dp": 2, "pp": 2, "schedule": "1f1b"},
        {"dp": 4, "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
        {"dp": 2, "pp": 2, "schedule": "zero-bubble-v"},
        {"dp": 2, "pp": 3, "schedule": "zero-bubble"},
    ],
)
def test_any_two_slots_of_a_stage_that_change_places_are_found_or_hold(
    tmp_path: Path, analysis: Path, config: dict[str, Any]
) -> None:
    """Beside a walk through them here, slot by slot."""
    path = build(analysis, tmp_path / "any", PlanConfig(chunk_size=16, k=1, global_batch=10, cp="off", **config)).path
    assert validate(path).ok
    verdicts = []
    for seed in range(8):
        chance = random.Random(seed)

        def change(rows: Rows, chance: random.Random = chance) -> None:
            stage = chance.randrange(config.get("pp", 1))
            ranks = rows_of(rows, stage=stage)
            first = chance.randrange(max(row["slots"][-1] for row in ranks))
            for row in ranks:
                row["slots"] = [slot + {first: 1, first + 1: -1}.get(slot, 0) for slot in row["slots"]]

        changed = shutil.copytree(path, tmp_path / f"any-{seed}")
        tamper(changed, change)
        verdicts.append(validate(changed).ok)
        assert verdicts[-1] == can_walk(_all_rows(changed), config.get("pp", 1), "v" in config.get("schedule", "")[-1:])
    assert not all(verdicts)


def _all_rows(plan: Path) -> list[dict[str, Any]]:
    return pq.read_table(plan / "schedule.parquet").to_pylist()


def can_walk(schedule: list[dict[str, Any]], pp: int, v_shaped: bool) -> bool:
    """Whether stages that do their slots one after another come to the end, and all in a slot do the same."""
    for step in {row["step"] for row in schedule}:
        slots: dict[tuple[int, int], list[tuple[int, str, int, int]]] = {}
        for row in (row for row in schedule if row["step"] == step):
            if sorted({*row["slots"]}) != row["slots"]:
                return False
            for action, slot in zip(row["actions"], row["slots"], strict=True):
                done = (row["dp_rank"], action["op"], action["chunk_id"], action["virtual_stage"])
                slots.setdefault((row["stage"], slot), []).append(done)
        over, done_at = [0] * pp, set[tuple[int, bool, int, int]]()
        moving = True
        while moving:
            moving = False
            for stage in range(pp):
                actions, needed, sent = slots.get((stage, over[stage]), []), [], []
                for rank, op, chunk, virtual_stage in actions:
                    model_stage = virtual_stage * pp + (pp - 1 - stage if v_shaped and virtual_stage else stage)
                    for is_forward, names, way in ((True, ("forward", "forward_kv"), -1), (False, BACKWARDS, 1)):
                        if op in names:
                            sent.append((rank, is_forward, model_stage, chunk))
                            needed.append((rank, is_forward, model_stage + way, chunk))
                last = max(virtual for each in slots.values() for *_, virtual in each) * pp + pp - 1
                if actions and all(each in done_at or not 0 <= each[2] <= last for each in needed):
                    done_at |= {*sent}
                    over[stage] += 1
                    moving = True
        if any(slot >= over[stage] for stage, slot in slots):
            return False
    return True


BACKWARDS = ("backward", "backward_input")
