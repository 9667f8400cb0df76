"""Schedules of several virtual stages are checked as others are, and their order of execution is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan import PlanConfig, build, validate
from chunkplan.operations import BACKWARDS, FORWARDS
from chunkplan.validation.checks_schedule import ActionGraph, run_stages
from tests.support.plan_rows import Rows, tamper

#: (op, chunk_id, virtual_stage)
StageAction = tuple[str, int, int]


class DeadlockError(ValueError):
    """No stage can go on. `stage` and `position` name the first action that is never done."""

    def __init__(self, stage: int, position: int) -> None:
        super().__init__(f"stage {stage} is stuck at action {position}")
        self.stage = stage
        self.position = position


def execution_order(stages: Sequence[Sequence[StageAction]]) -> Iterator[tuple[int, int]]:
    """Yield (stage, position) of every action in an order that respects every link: one after another, as written.

    Raises:
        DeadlockError: the graph has a cycle, or an action waits for one that does not exist.
    """
    pp = len(stages)
    last_stage = pp * (1 + max((action[2] for stage in stages for action in stage), default=0)) - 1
    done: set[tuple[str, int, int]] = set()  # (direction, chunk_id, model stage)
    position = [0] * pp
    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(stages):
            while position[stage] < len(actions):
                op, chunk_id, virtual_stage = actions[position[stage]]
                model_stage = virtual_stage * pp + stage
                if op in FORWARDS:
                    if model_stage > 0 and ("forward", chunk_id, model_stage - 1) not in done:
                        break
                    done.add(("forward", chunk_id, model_stage))
                elif op in BACKWARDS:
                    if model_stage < last_stage and ("backward", chunk_id, model_stage + 1) not in done:
                        break
                    done.add(("backward", chunk_id, model_stage))
                yield stage, position[stage]
                position[stage] += 1
                progress = True
    for stage, actions in enumerate(stages):
        if position[stage] < len(actions):
            raise DeadlockError(stage, position[stage])


def interleave(rows: Rows, pp: int) -> None:
    """The same actions on `pp` stages, each with as many virtual stages as that takes."""
    stages: dict[tuple[int, int], list[list[tuple[str, int, int]]]] = {}
    for row in rows["schedule"]:
        actions = [(action["op"], action["chunk_id"], 0) for action in row["actions"]]
        stages.setdefault((row["step"], row["dp_rank"]), []).append(actions)
    rows["schedule"] = []
    for (step, dp_rank), model_stages in stages.items():
        merged: list[list[dict[str, Any]]] = [[] for _ in range(pp)]
        for model_stage, position in execution_order(model_stages):
            op, chunk_id, _ = model_stages[model_stage][position]
            merged[model_stage % pp].append({"op": op, "chunk_id": chunk_id, "virtual_stage": model_stage // pp})
        rows["schedule"] += [
            {"step": step, "dp_rank": dp_rank, "stage": stage, "actions": actions, "predicted_us": 1.0}
            for stage, actions in enumerate(merged)
        ]


@pytest.fixture
def interleaved(tmp_path: Path, analysis: Path) -> Path:
    """Two steps on two stages of two virtual stages each."""
    plan = build(
        analysis, tmp_path / "interleaved", PlanConfig(chunk_size=16, k=2, global_batch=10, pp=4, tail_sharing=True)
    ).path
    tamper(plan, lambda rows: interleave(rows, 2), pp=2, virtual_stages=2)
    return plan


def of_virtual_stage(actions: list[dict[str, Any]], virtual_stage: int, op: str) -> list[int]:
    """Where a stage does `op` on one of its virtual stages."""
    return [i for i, each in enumerate(actions) if (each["virtual_stage"], each["op"]) == (virtual_stage, op)]


def backward_missing_on_a_virtual_stage(rows: Rows) -> None:
    del rows["schedule"][-1]["actions"][of_virtual_stage(rows["schedule"][-1]["actions"], 1, "backward")[0]]


def virtual_stage_that_is_not_there(rows: Rows) -> None:
    for action in rows["schedule"][-1]["actions"]:
        action["virtual_stage"] *= 2


def recompute_missing_on_a_virtual_stage(rows: Rows) -> None:
    row = next(row for row in rows["schedule"] if of_virtual_stage(row["actions"], 1, "recompute"))
    del row["actions"][of_virtual_stage(row["actions"], 1, "recompute")[0]]


def gradients_crossed_on_a_virtual_stage(rows: Rows) -> None:
    """The last stage takes two standalone chunks on its second virtual stage in another order than its neighbour."""
    last = rows["schedule"][-1]
    standalone = {row["chunk_id"] for row in rows["chunks"] if row["step"] == 1 and row["group_id"] is None}
    one, other = sorted(standalone)[:2]
    for action in last["actions"]:
        if action["virtual_stage"] == 1 and action["chunk_id"] in (one, other):
            action["chunk_id"] = one + other - action["chunk_id"]


def first_virtual_stage_waits_for_itself(rows: Rows) -> None:
    """The first stage wants to forward a chunk on its second virtual stage before it does on its first."""
    actions = rows["schedule"][-2]["actions"]
    forward = next(i for i, action in enumerate(actions) if action["virtual_stage"] == 1)
    before = next(i for i, action in enumerate(actions) if action["chunk_id"] == actions[forward]["chunk_id"])
    actions.insert(before, actions.pop(forward))


INTERLEAVED: dict[str, tuple[str, Callable[[Rows], None], str]] = {
    "a backward missing": ("actions", backward_missing_on_a_virtual_stage, "model stage (1, 1)"),
    "a virtual stage that is not there": ("actions", virtual_stage_that_is_not_there, "names virtual stage 2"),
    "a recompute missing": ("recompute", recompute_missing_on_a_virtual_stage, "a recompute directly before"),
    "chunks in different orders": ("links", gradients_crossed_on_a_virtual_stage, "stages 0 and 1"),
    "a deadlock": ("acyclic", first_virtual_stage_waits_for_itself, "stage 0 is stuck"),
}


@pytest.fixture
def v_shaped(tmp_path: Path, analysis: Path) -> Path:
    """Two steps on two stages, whose second virtual stages are in descending order."""
    config = PlanConfig(chunk_size=16, k=2, global_batch=10, pp=2, schedule="zero-bubble-v")
    return build(analysis, tmp_path / "v", config).path


def last_model_stage_missing_a_backward(rows: Rows) -> None:
    """The last model stage is on stage 0."""
    actions = rows["schedule"][-2]["actions"]
    del actions[of_virtual_stage(actions, 1, "backward_input")[0]]


def last_backward_before_the_turn(rows: Rows) -> None:
    """Stage 1 backwards a chunk on its first virtual stage before it does so on its second one, which is behind."""
    actions = rows["schedule"][-1]["actions"]
    behind = of_virtual_stage(actions, 1, "backward_input")[0]
    chunk_id = actions[behind]["chunk_id"]
    own = next(i for i in of_virtual_stage(actions, 0, "backward_input") if actions[i]["chunk_id"] == chunk_id)
    actions.insert(behind, actions.pop(own))


V_SHAPED: dict[str, tuple[str, Callable[[Rows], None], str]] = {
    "a backward missing": ("actions", last_model_stage_missing_a_backward, "model stage (0, 1)"),
    "chunks in different orders": ("links", gradients_crossed_on_a_virtual_stage, "stages 1 and 1"),
    "a deadlock": ("acyclic", last_backward_before_the_turn, "stage 1 is stuck"),
}
BROKEN = [("interleaved", *case) for case in INTERLEAVED.values()] + [("v_shaped", *case) for case in V_SHAPED.values()]


@pytest.mark.parametrize(("plan_of", "invariant", "change", "words"), BROKEN)
def test_a_broken_schedule_of_virtual_stages_is_named(
    request: pytest.FixtureRequest, plan_of: str, invariant: str, change: Callable[[Rows], None], words: str
) -> None:
    plan = request.getfixturevalue(plan_of)
    assert validate(plan).ok
    tamper(plan, change)
    [violation] = validate(plan).violations
    assert (violation.invariant, violation.dp_rank) == (invariant, 0)
    assert plan_of == "v_shaped" or None not in (violation.step, violation.chunk_id)
    assert words in violation.message


def test_a_v_is_not_what_interleaved_stages_do(v_shaped: Path) -> None:
    """The same actions under the name of another schedule deadlock."""
    tamper(v_shaped, lambda rows: None, schedule="interleaved")
    assert {violation.invariant for violation in validate(v_shaped).violations} == {"acyclic"}


def test_all_model_stages_on_one_stage_are_valid(plan: Path) -> None:
    tamper(plan, lambda rows: interleave(rows, 1), pp=1, virtual_stages=2)
    assert validate(plan).ok


@given(st.data(), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))
def test_ranks_that_run_side_by_side_end_where_they_do_one_after_another(
    data: st.DataObject, pp: int, num_virtual: int, num_ranks: int
) -> None:
    """Two chunks forwarded and backwarded on every model stage, in any order that each stage may come up with."""
    everything = [
        (op, chunk, virtual) for op in ("forward", "backward") for chunk in (0, 1) for virtual in range(num_virtual)
    ]
    ranks = [[data.draw(st.permutations(everything)) for _ in range(pp)] for _ in range(num_ranks)]
    expected: list[int] = []
    waits_for: list[int] = []
    for rank, stages in enumerate(ranks):
        reached = [0] * pp
        with suppress(DeadlockError):
            for stage, position in execution_order(stages):
                reached[stage] = position + 1
        first = [(rank * pp + stage) * len(everything) for stage in range(pp)]
        expected += [start + position for start, position in zip(first, reached, strict=True)]
        for stage, actions in enumerate(stages):
            for op, chunk, virtual in actions:
                model_stage = virtual * pp + stage + (-1 if op == "forward" else 1)
                there, other = model_stage % pp, (op, chunk, model_stage // pp)
                waits_for.append(first[there] + stages[there].index(other) if other in everything else -1)
    offsets = np.arange(num_ranks * pp + 1) * len(everything)
    unit, meets_nobody = np.repeat(np.arange(num_ranks), pp), np.full(len(waits_for), -1)
    assert run_stages(ActionGraph(offsets, unit, np.array(waits_for), meets_nobody)).tolist() == expected
