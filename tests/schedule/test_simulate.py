"""When actions end: with links, ranks that meet for chunks, slots that are given, and the link to host memory."""

from __future__ import annotations

import numpy as np
import pytest

from chunkplan.cost.model import Sharding
from chunkplan.operations import OPS
from chunkplan.schedule.alignment import meeting_of
from chunkplan.schedule.simulate import simulate, simulate_slots
from tests.schedule.test_alignment import Step, played, random_step

NOTHING = np.empty((0, 0, 0), np.int64)


def in_slots(step: Step, sharding: Sharding, before: np.ndarray, moves: np.ndarray = NOTHING) -> list[int]:
    meeting = meeting_of(sharding)
    return simulate_slots(
        step.chunks, step.actions, step.times, step.pp, step.placement, step.dp, meeting, before, moves
    ).tolist()


def some_moves(seed: int, step: Step) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return draw.integers(0, 90, step.times.durations.shape) * draw.integers(0, 2, step.times.durations.shape)


def test_ranks_and_stages_wait_for_nothing_but_links_and_those_who_share_a_chunk() -> None:
    for seed in range(60):
        step = random_step(seed)
        ends = simulate(step.chunks, step.actions, step.times, step.pp, step.placement, step.dp)
        assert ends.tolist() == played(step, "optimizer")


@pytest.mark.parametrize("sharding", ["gradients", "weights"])
def test_slots_that_are_given_have_actions_end_as_where_they_were_chosen(sharding: Sharding) -> None:
    for seed in range(60):
        step = random_step(seed)
        slots = step.aligned(sharding)
        assert in_slots(step, sharding, slots.before) == slots.ends.tolist()


def test_other_slots_than_the_best_are_played_as_they_are_given() -> None:
    """One slot for each action, stage by stage in the order in which a play without slots has them begin."""
    for seed in range(30):
        step = random_step(seed)
        if (step.chunks.cp_size > 1).any():
            continue
        ends = simulate(step.chunks, step.actions, step.times, step.pp, step.placement, step.dp)
        before, num_rows = np.zeros(ends.size, np.int64), step.dp * step.pp
        stage = np.repeat(np.arange(num_rows) % step.pp, np.diff(step.actions.stages))
        for each in range(step.pp):
            own = np.flatnonzero(stage == each)
            before[own[np.argsort(ends[own], kind="stable")]] = np.arange(own.size)
        found = np.array(in_slots(step, "weights", before))
        assert (found >= ends).all() and found.max() > ends.max() * 1.2
        for each in range(step.pp):  # nothing of the stage goes on beside a slot
            own = np.flatnonzero(stage == each)
            assert (np.diff(found[own[np.argsort(before[own])]]) > 0).all()


def test_slots_in_an_order_that_ranks_do_not_keep_to_are_never_over() -> None:
    step = random_step(1)
    slots = step.aligned("weights")
    last = int(slots.before.max())
    assert min(in_slots(step, "weights", last - slots.before)) == -1


@pytest.mark.parametrize("sharding", ["optimizer", "gradients", "weights"])
def test_what_is_fetched_from_the_host_is_there_before_an_action_ends(sharding: Sharding) -> None:
    for seed in range(40):
        step = random_step(seed)
        moves, slots = some_moves(seed, step), step.aligned(sharding)
        assert in_slots(step, sharding, slots.before, moves) == played(step, sharding, moves)


def test_what_is_sent_to_the_host_goes_on_beside_what_follows() -> None:
    step = random_step(4)
    moves = np.zeros(step.times.durations.shape, np.int64)
    none = in_slots(step, "optimizer", np.empty(0, np.int64))
    moves[[OPS.index("forward"), OPS.index("forward_kv")]] = 10_000
    assert in_slots(step, "optimizer", np.empty(0, np.int64), moves) == none
    moves[[OPS.index("backward"), OPS.index("backward_input")]] = 1
    assert max(in_slots(step, "optimizer", np.empty(0, np.int64), moves)) > max(none) + 10_000
