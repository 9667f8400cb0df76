"""Slots: ranks that share weights or gradients meet in one order, in which nothing deadlocks."""

from __future__ import annotations

import random
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from chunkplan import PlanConfig, build
from chunkplan.arrays import Int8Array, Int64Array, offsets_of
from chunkplan.cost.durations import ChunkTimes
from chunkplan.cost.model import Sharding
from chunkplan.layers import FAMILIES, STRAIGHT, StagePlacement, model_stage_of
from chunkplan.operations import BACKWARDS, FORWARDS, OPS
from chunkplan.planfile.chunks import Chunks, chunks_without_segments
from chunkplan.schedule import slots as slots_module
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.families import schedule_ranks
from chunkplan.schedule.simulate import initial_state, step_graph
from chunkplan.schedule.slots import assign_slots, slot_ops_of
from chunkplan.schedule.trace import trace_events
from chunkplan.simulation import simulate_ranks
from tests.support.plain import PLAIN, plain_cost

#: Schedules with their virtual stages, and whether ranks may share sequences under them.
PIPELINES = [("1f1b", 1), ("auto", 1), ("zero-bubble", 1), ("interleaved", 2), ("zero-bubble-v", 2)]
FOR_GROUPS = ("algorithm2", "1f1b")


class Slots(NamedTuple):
    """The slots of a step, and where actions come between them.

    `ops` int8 and `virtual_stages` int64 [num_slots], those of stage s from `stages[s]` to `stages[s + 1]` in order,
    int64 [pp + 1]. `before` int64 [num_actions]: how many slots of its stage are over when an action begins; if it
    meets others, the one after these is its own. `ends` int64 [num_actions]: when it ends, in the unit of the times; a
    slot is over for all at once. -1 of what is never done, as ranks deadlock.
    """

    ops: Int8Array
    virtual_stages: Int64Array
    stages: Int64Array
    before: Int64Array
    ends: Int64Array


def align(
    chunks: Chunks,
    actions: Actions,
    times: ChunkTimes,
    meeting: Int8Array,
    dp: int,
    pp: int,
    placement: StagePlacement = STRAIGHT,
) -> Slots:
    """The slots of a step; the arguments are those of `assign_slots`."""
    ends, before = assign_slots(chunks, actions, times, meeting, dp, pp, placement)
    stage = np.repeat(np.arange(dp * pp) % pp, np.diff(actions.stages))
    met = np.flatnonzero((meeting[actions.ops] >= 0) & (ends >= 0))
    # Every slot has an action at least, and all of one say the same of it.
    _, first = np.unique(np.stack([stage[met], before[met]]), axis=1, return_index=True)
    first = met[first]
    return Slots(
        meeting[actions.ops[first]],
        actions.virtual_stages[first].astype(np.int64),
        offsets_of(np.bincount(stage[first], minlength=pp)),
        before,
        ends,
    )


class Step(NamedTuple):
    """A step of `dp` ranks on `pp` stages."""

    chunks: Chunks
    actions: Actions
    times: ChunkTimes
    dp: int
    pp: int
    placement: StagePlacement

    def aligned(self, sharding: Sharding) -> Slots:
        return align(self.chunks, self.actions, self.times, slot_ops_of(sharding), self.dp, self.pp, self.placement)

    def row(self, rank: int, stage: int) -> range:
        return range(*self.actions.stages[rank * self.pp + stage : rank * self.pp + stage + 2])


def model_stages_of(actions: Actions, pp: int, placement: StagePlacement) -> Int64Array:
    """The model stage that each action is of, int64 [num_actions]."""
    stage = np.repeat(np.arange(actions.stages.size - 1) % pp, np.diff(actions.stages))
    return model_stage_of(stage, actions.virtual_stages.astype(np.int64), pp, placement)


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
    return Step(
        chunks, found.actions, times, dp, pp, FAMILIES[schedule].placement._replace(virtual_stages=virtual_stages)
    )


def check(step: Step, sharding: Sharding) -> tuple[int, int]:
    """Every action has a slot of its op, and what processes wait for has no circle; returns how much is padding."""
    slots, meeting = step.aligned(sharding), slot_ops_of(sharding)
    ops, meets = step.actions.ops, meeting[step.actions.ops] >= 0
    assert (slots.ends >= 0).all()
    model_stage = model_stages_of(step.actions, step.pp, step.placement)
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
    waits.prepare()  # raises where they wait in a cycle
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
    slots = align(chunks, found.actions, times, slot_ops_of("weights"), 2, 1)
    assert slots.ends.max() == found.stage_end.max() == 100 * (6 + 6 + 5)


def test_actions_that_wait_for_each_other_for_ever_are_never_done() -> None:
    """A backward before its forward on the stage behind."""
    chunks = chunks_without_segments([0, 1], 1)
    forward, backward = OPS.index("forward"), OPS.index("backward")
    ops = np.array([backward, forward, forward, backward], np.int8)
    actions = Actions(ops, np.zeros(4, np.int32), np.zeros(4, np.int32), np.array([0, 2, 4]))
    times = ChunkTimes(np.ones((len(OPS), 2, 1), np.int64), np.zeros(1, np.int64))
    assert (align(chunks, actions, times, slot_ops_of("weights"), 1, 2).ends < 0).any()


def played(step: Step, sharding: Sharding) -> list[int]:
    """When each action ends, by the slots alone: an event is done once all that its ranks and stages wait for is."""
    slots, meeting = step.aligned(sharding), slot_ops_of(sharding)
    ops, chunk_ids = step.actions.ops, step.actions.chunk_ids
    stages = model_stages_of(step.actions, step.pp, step.placement)
    queues: dict[tuple[int, int], list[tuple[object, int]]] = {}  # of each rank and stage: events with actions, or -1
    chunk_of: dict[int, int] = {}
    for rank in range(step.dp):
        for stage in range(step.pp):
            queue: list[tuple[object, int]] = []
            over = 0
            for action in step.row(rank, stage):
                chunk_of[action] = int(step.chunks.rank_chunks[rank] + chunk_ids[action])
                shares = step.chunks.cp_size[chunk_of[action]] > 1 and OPS[ops[action]] != "backward_weight"
                event: object = ("alone", action)
                if meeting[ops[action]] >= 0:
                    event = ("slot", stage, int(slots.before[action]))
                elif shares:
                    event = ("shared", stage, int(stages[action]), int(ops[action]), int(chunk_ids[action]))
                queue += [(("slot", stage, each), -1) for each in range(over, int(slots.before[action]))]
                over = int(slots.before[action]) + (meeting[ops[action]] >= 0)
                queue.append((event, action))
            queue += [(("slot", stage, each), -1) for each in range(over, int(np.diff(slots.stages)[stage]))]
            queues[rank, stage] = queue
    members: dict[object, list[tuple[int, int]]] = {}
    for key, queue in queues.items():
        for event, _ in queue:
            members.setdefault(event, []).append(key)
    free = dict.fromkeys(queues, 0)
    sent: dict[tuple[bool, int, int], int] = {}
    ends: dict[int, int] = {}
    while any(queues.values()):
        ready = [
            event
            for event in dict.fromkeys(queue[0][0] for queue in queues.values() if queue)
            if all(queues[key] and queues[key][0][0] == event for key in members[event])
            and all(_needed(step, stages, chunk_of, queues[key][0][1], sent) is not None for key in members[event])
        ]
        assert ready, "they deadlock"
        for event in ready:
            own = [(key, queues[key].pop(0)[1]) for key in members[event]]
            needed = [_needed(step, stages, chunk_of, action, sent) or 0 for _, action in own]
            begin = max([*needed, *(free[key] for key, _ in own)])
            took = [int(step.times.durations[ops[a], stages[a], chunk_of[a]]) if a >= 0 else 0 for _, a in own]
            for (key, action), own_time in zip(own, took, strict=True):
                is_slot = isinstance(event, tuple) and event[0] == "slot"
                free[key] = begin + (max(took) if is_slot else own_time)
                if action >= 0:
                    ends[action] = free[key]
                    for is_forward, names in ((True, FORWARDS), (False, BACKWARDS)):
                        if OPS[ops[action]] in names:
                            sent[is_forward, int(stages[action]), chunk_of[action]] = free[key]
    return [ends[action] for action in range(ops.size)]


def _needed(step: Step, stages: np.ndarray, chunk_of: dict[int, int], action: int, sent: dict) -> int | None:
    """When what an action waits for from another stage is there; None: not yet."""
    op = OPS[step.actions.ops[action]]
    if action < 0 or op not in (*FORWARDS, *BACKWARDS):
        return 0
    is_forward = op in FORWARDS
    sender = int(stages[action]) + (-1 if is_forward else 1)
    if not 0 <= sender < step.times.durations.shape[1]:
        return 0
    end = sent.get((is_forward, sender, chunk_of[action]))
    turns = step.placement.turns and min(sender, int(stages[action])) == step.pp - 1
    link = 0 if turns or step.pp == 1 else int(step.times.link[chunk_of[action]])
    return None if end is None else end + link


@pytest.mark.parametrize("sharding", ["gradients", "weights"])
def test_actions_end_when_a_simulation_of_events_has_them_end(sharding: Sharding) -> None:
    for seed in range(40):
        step = random_step(seed)
        assert step.aligned(sharding).ends.tolist() == played(step, sharding)


@pytest.mark.parametrize("sharding", ["gradients", "weights"])
@pytest.mark.parametrize(
    "config",
    [
        {"dp": 4, "cp": "off"},
        {"dp": 4, "cp": "auto"},
        {"dp": 2, "pp": 2, "schedule": "zero-bubble", "cp": "off"},
        {"dp": 2, "pp": 2, "schedule": "zero-bubble-v", "cp": "off"},
    ],
)
def test_a_plan_takes_what_its_slots_take(config: dict[str, Any], sharding: Sharding, tmp_path: Path) -> None:
    """In its files, and played through, where waiting is told from work; without slots it takes no longer.

    Gradients are added up in no time, of which sharded ones would take less.
    """
    lengths = np.array([9000, 700, 40_000, 1200, 300, 5000, 2500, 800, 16_000, 90, 3000, 4100])
    np.save(tmp_path / "lengths.npy", lengths)
    settings = PlanConfig(chunk_size=4096, k=1, global_batch=6, **config)
    plans = [
        build(
            tmp_path / "lengths.npy",
            tmp_path / each,
            settings,
            cost=plain_cost(sharding=each, hardware=replace(PLAIN, copy_bytes=1e18)),
        )
        for each in (sharding, "optimizer")
    ]
    later = 0
    for described, without in zip(*(plan.iter_steps() for plan in plans), strict=True):
        found = simulate_ranks(plans[0], described, range(settings.dp))
        for rank, simulation in found.items():
            assert simulation.makespan == pytest.approx(
                max(described.schedule_us[rank, stage] for stage in range(settings.pp)), rel=1e-6
            )
            assert simulation.has_slots and (simulation.waits >= 0).all()
            assert sum(simulation.critical_path.values()) == pytest.approx(simulation.makespan)
            for action in simulation.critical_actions:
                own = found[action.rank]
                assert (action.start, action.end) == (own.starts[action.place], own.ends[action.place])
            for stage in range(settings.pp):
                idle = sum(simulation.waiting_per_stage[stage].values())
                busy = simulation.busy_per_stage[stage] * simulation.makespan
                waiting = simulation.waiting_for_ranks_per_stage[stage]
                assert idle + busy + waiting == pytest.approx(simulation.makespan)
            assert any(event.get("name") == "waits for other ranks" for event in trace_events(simulation)) == (
                simulation.waits.max() > 0
            )
        if config["cp"] == "off":
            assert described.predicted_us >= without.predicted_us * (1 - 1e-6)  # a float32
            later += described.predicted_us > without.predicted_us * (1 + 1e-6)
    assert later or "pp" not in config  # on one stage the rank with the longest sequence has no one to wait for


def test_of_ranks_that_meet_in_slots_all_share_a_sequence_or_none(tmp_path: Path) -> None:
    """Where blocks of fewer would have them wait in slots."""
    np.save(tmp_path / "lengths.npy", np.array([60_000, 30_000, 25_000, *[2000] * 61]))
    sizes = {}
    for sharding in ("optimizer", "weights"):
        config = PlanConfig(chunk_size=8192, k=1, global_batch=64, dp=8, cp="auto")
        plan = build(tmp_path / "lengths.npy", tmp_path / sharding, config, cost=plain_cost(sharding=sharding))
        chunks = [chunk for step in plan.iter_steps() for of_rank in step.chunks.values() for chunk in of_rank]
        sizes[sharding] = {chunk.cp_size for chunk in chunks}
    assert sizes["weights"] == {1, 8}
    assert sizes["optimizer"] - {1, 8}


@pytest.mark.parametrize("sharding", ["gradients", "weights"])
@pytest.mark.parametrize("group", [1, 2])
def test_ranks_that_go_through_the_same_slots_have_those_of_any_rule(group: int, sharding: Sharding) -> None:
    """Found without playing event by event: of ranks with any numbers of groups alike, on one stage."""
    for seed in range(40):
        draw = np.random.default_rng(seed)
        sizes = draw.integers(0, 6, 4)
        sizes[0] += 1
        group_id = [each if group > 1 else -1 for size in sizes for each in range(size) for _ in range(group)]
        n = len(group_id)
        chunks = chunks_without_segments(np.cumsum([0, *group * sizes]), 1, group_id, [True] * n)
        times = ChunkTimes(draw.integers(0, 9, (len(OPS), 1, n)), np.zeros(n, np.int64))
        actions = schedule_ranks(chunks, times, 1, "algorithm2", None, str, 4).actions
        found = align(chunks, actions, times, slot_ops_of(sharding), 4, 1)
        step = step_graph(chunks, actions, times, 0, 4, 1, STRAIGHT)
        slots = slot_ops_of(sharding)[actions.ops].astype(np.int64)
        assert slots_module._same_slots(step, slots)
        for rule, patience in product((0, 1), (0, 1)):
            slots_module.run_greedy(step, state := initial_state(step, 1), 1, slots, rule, patience)
            assert np.array_equal(state.ends, found.ends) and np.array_equal(state.slots_before, found.before)
