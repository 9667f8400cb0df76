"""Slots: ranks that share weights or gradients meet in one order, in which nobody waits for ever."""

from __future__ import annotations

import random
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest

from chunkplan.cost.durations import ChunkTimes
from chunkplan.cost.model import Sharding
from chunkplan.layers import V_SHAPED
from chunkplan.operations import BACKWARDS, FORWARDS, OPS
from chunkplan.planfile.chunks import Chunks, chunks_without_segments
from chunkplan.schedule.actions import Actions, model_stages_of
from chunkplan.schedule.alignment import Slots, align, meeting_of
from chunkplan.schedule.families import schedule_ranks

#: Schedules with their virtual stages, and whether ranks may share sequences under them.
PIPELINES = [("1f1b", 1), ("auto", 1), ("zero-bubble", 1), ("interleaved", 2), ("zero-bubble-v", 2)]
FOR_GROUPS = ("algorithm2", "1f1b")


class Step(NamedTuple):
    """A step of `dp` ranks on `pp` stages."""

    chunks: Chunks
    actions: Actions
    times: ChunkTimes
    dp: int
    pp: int
    v_shaped: bool

    def aligned(self, sharding: Sharding) -> Slots:
        return align(self.chunks, self.actions, self.times, meeting_of(sharding), self.dp, self.pp, self.v_shaped)

    def row(self, rank: int, stage: int) -> range:
        return range(*self.actions.stages[rank * self.pp + stage : rank * self.pp + stage + 2])


def random_step(seed: int, *, alike: bool = False) -> Step:
    """Ranks with any numbers of groups, of any K, some of them without a chunk; some share their first groups."""
    chance = random.Random(seed)
    dp, pp = chance.randint(2, 4), chance.choice([1, 1, 2, 3])
    pipelines = [each for each in PIPELINES if each[0] in ("1f1b", "interleaved") or not alike]
    schedule, virtual_stages = chance.choice(pipelines) if pp > 1 else ("algorithm2", 1)
    shared = chance.choices(range(1, 4), k=chance.randint(1, 2)) if schedule in FOR_GROUPS and seed % 3 == 0 else []
    k = chance.choice([1, 2, 9])
    ranks: list[list[int]] = []
    for _ in range(dp):
        ranks.append(
            ranks[0]
            if alike and ranks
            else shared + [chance.randint(1, 4) for _ in range(chance.randint(not shared, 4))]
        )
    group_id, keeps, shares = [], list[bool](), list[bool]()
    for sizes in ranks:
        for number, size in enumerate(sizes):
            is_shared = number < len(shared)
            group_id += [number if size > 1 or is_shared else -1] * size
            keeps += [place >= size - k for place in range(size)]
            shares += [is_shared] * size
    chunks = chunks_without_segments(np.cumsum([0, *map(sum, ranks)]), 1, group_id, keeps)
    chunks.cp_size[:] = np.where(shares, dp, 1)
    draw = np.random.default_rng(seed)
    n = len(group_id)
    durations = draw.integers(1, 50, (len(OPS), pp * virtual_stages, n))
    times = ChunkTimes(durations, draw.integers(0, 5, n))
    if alike:
        times.durations[:], times.link[:] = 10, 3
    found = schedule_ranks(chunks, times, pp, schedule, None, str, dp)
    return Step(chunks, found.actions, times, dp, pp, schedule in V_SHAPED)


def check(step: Step, sharding: Sharding) -> tuple[int, int]:
    """Every action has a slot of its op, and what processes wait for has no circle; returns how much is padding."""
    slots, meeting = step.aligned(sharding), meeting_of(sharding)
    ops, meets = step.actions.ops, meeting[step.actions.ops] >= 0
    assert (slots.ends >= 0).all()
    model_stage = model_stages_of(step.actions, step.pp, step.v_shaped)
    rank = np.repeat(np.arange(step.dp * step.pp) // step.pp, np.diff(step.actions.stages))
    chunk = step.chunks.rank_chunks[rank] + step.actions.chunk_ids
    waits: TopologicalSorter[tuple[object, ...]] = TopologicalSorter()
    node_of: dict[int, tuple[object, ...]] = {}
    num_slots = np.diff(slots.stages)
    for own in range(step.dp):
        for stage in range(step.pp):
            order: list[tuple[object, ...]] = []
            over = 0
            for action in step.row(own, stage):
                before = int(slots.before[action])
                order += [("slot", stage, each) for each in range(over, before)]
                over = before + int(meets[action])
                if meets[action]:
                    node: tuple[object, ...] = ("slot", stage, before)
                    place = slots.stages[stage] + before
                    assert slots.ops[place] == meeting[ops[action]]
                    assert slots.virtual_stages[place] == step.actions.virtual_stages[action]
                elif step.chunks.cp_size[chunk[action]] > 1 and OPS[ops[action]] != "backward_weight":
                    node = ("met", stage, ops[action], step.actions.chunk_ids[action])
                else:
                    node = ("alone", action)
                node_of[action] = node
                order.append(node)
            order += [("slot", stage, each) for each in range(over, num_slots[stage])]
            for before_it, after in pairwise(order):
                waits.add(after, before_it)
    place_of = {
        (OPS[ops[a]] in FORWARDS, OPS[ops[a]] in BACKWARDS, model_stage[a], chunk[a]): a for a in range(ops.size)
    }
    for action, node in node_of.items():
        op = OPS[ops[action]]
        is_forward, is_backward = op in FORWARDS, op in BACKWARDS
        next_to = model_stage[action] + (-1 if is_forward else 1)
        if (is_forward or is_backward) and 0 <= next_to < step.times.durations.shape[1]:
            needed = node_of[place_of[is_forward, is_backward, next_to, chunk[action]]]
            if needed != node:
                waits.add(node, needed)
    waits.prepare()  # raises where they wait in a circle
    for shared in np.flatnonzero(meets & (step.chunks.cp_size[chunk] > 1) & (ops != OPS.index("backward_weight"))):
        same = (step.actions.chunk_ids == step.actions.chunk_ids[shared]) & (ops == ops[shared])
        same &= (model_stage == model_stage[shared]) & (step.chunks.cp_size[chunk] > 1)
        assert len(set(slots.before[same])) == 1, "what ranks share they do in one slot"
    own_slots = int(meets.sum())
    return int(num_slots.sum()) * step.dp - own_slots, own_slots


@pytest.mark.parametrize("sharding", ["gradients", "weights"])
def test_random_plans_have_slots_in_which_nobody_waits_for_ever(sharding: Sharding) -> None:
    for seed in range(100):
        check(random_step(seed), sharding)


def test_ranks_that_do_the_same_have_no_padding() -> None:
    for seed in range(20):
        for sharding in ("gradients", "weights"):
            assert check(random_step(seed, alike=True), sharding)[0] == 0


def test_what_is_not_shared_has_no_slots() -> None:
    step = random_step(4)
    slots = step.aligned("optimizer")
    assert slots.ops.size == 0 and not slots.before.any()
    assert (slots.ends >= 0).all()


def test_a_rank_with_most_left_to_do_is_not_kept_waiting_for_others() -> None:
    """One sequence of six parts beside many short chunks: the step takes what the long one does, and little more."""
    long, short = 6, 5
    group_id = [0] * long + [-1] * short
    keeps = [False] * (long - 1) + [True] * (1 + short)
    chunks = chunks_without_segments([0, long, long + short], 1, group_id, keeps)
    durations = np.where(np.arange(long + short) < long, 100, 10) * np.ones((len(OPS), 1, 1), np.int64)
    times = ChunkTimes(durations, np.zeros(long + short, np.int64))
    found = schedule_ranks(chunks, times, 1, "algorithm2", None, str, 2)
    slots = align(chunks, found.actions, times, meeting_of("weights"), 2, 1)
    assert slots.ends.max() == found.stage_end.max() == 100 * (6 + 6 + 5)


def test_actions_that_wait_for_each_other_for_ever_are_never_done() -> None:
    """A backward before its forward on the stage behind."""
    chunks = chunks_without_segments([0, 1], 1)
    forward, backward = OPS.index("forward"), OPS.index("backward")
    ops = np.array([backward, forward, forward, backward], np.int8)
    actions = Actions(ops, np.zeros(4, np.int32), np.zeros(4, np.int32), np.array([0, 2, 4]))
    times = ChunkTimes(np.ones((len(OPS), 2, 1), np.int64), np.zeros(1, np.int64))
    assert (align(chunks, actions, times, meeting_of("weights"), 1, 2).ends < 0).any()
