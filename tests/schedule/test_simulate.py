"""When actions end: with links, ranks that meet for chunks, and slots that are given."""

from __future__ import annotations

import numpy as np
import pytest

from chunkplan.cost.model import Sharding
from chunkplan.schedule.simulate import simulate, simulate_slots
from chunkplan.schedule.slots import slot_ops_of
from tests.schedule.test_alignment import Step, played, random_step


def in_slots(step: Step, sharding: Sharding, before: np.ndarray) -> list[int]:
    meeting = slot_ops_of(sharding)
    ends = simulate_slots(step.chunks, step.actions, step.times, step.pp, step.placement, step.dp, meeting, before)
    return ends.tolist()


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
