"""Processes walk through the slots of a plan: all of a stage meet for the same, and none deadlocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from chunkplan import PlanConfig, build, load_plan
from chunkplan.errors import DataError
from chunkplan_runtime.distributed.sharding import dummy_collectives
from chunkplan_runtime.feed.stream import StepWork
from chunkplan_runtime.layout import RankLayout, one_pipeline

LENGTHS = np.array([23, 5, 9, 3, 1, 30, 8, 41, 17, 2, 6, 12, 11, 4, 27, 19])

PIPELINES = {
    "one stage": {},
    "1F1B": {"pp": 2, "schedule": "1f1b"},
    "interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "zero-bubble-v": {"pp": 2, "schedule": "zero-bubble-v"},
    "zero-bubble": {"pp": 3, "schedule": "zero-bubble"},
}

#: By what is shared, what ranks meet for in an op: written down here once more.
MEETS = {
    "gradients": {"backward": "reduce", "backward_weight": "reduce"},
    "weights": {
        "forward": "gather",
        "forward_kv": "gather",
        "recompute": "gather",
        "backward": "gather and reduce",
        "backward_input": "gather in reverse",
        "backward_weight": "reduce",
    },
}
#: The same of what a process is told to take part in.
PADDINGS = {
    "gradients": {"backward_weight": "reduce"},
    "weights": {op: MEETS["weights"][op] for op in ("forward", "backward", "backward_input", "backward_weight")},
}

#: What a process does: it meets those of its stage ("meet", what, virtual stage), or it needs what another stage sends.
Event = tuple[str, Any, int]


def make_plan(folder, **config):
    np.save(folder / "lengths.npy", LENGTHS)
    settings = PlanConfig(chunk_size=8, k=1, global_batch=LENGTHS.size, **{"dp": 4, "cp": "off", **config})
    return load_plan(build(folder / "lengths.npy", folder / "plan", settings).path)


def events_of(work, layout, sharding, *, only_forwards):
    """What a process does in a step, in order, by its paddings and its own actions."""
    paddings = iter(dummy_collectives(work, layout, sharding, only_forwards=only_forwards))
    last = layout.num_model_stages - 1

    def padded():
        yield from (("meet", PADDINGS[sharding][op], stage) for op, stage in next(paddings))

    for rank in layout.dp_ranks(work.plan.config.dp):
        for action in work.step.actions.get((rank, layout.stage), []):
            is_forward = action.op in ("forward", "forward_kv")
            if only_forwards and not is_forward:
                continue
            yield from padded()
            place = layout.model_stages()[action.virtual_stage]
            sends = is_forward or action.op in ("backward", "backward_input")
            if sends and place != (0 if is_forward else last):
                needed = place - 1 if is_forward else place + 1
                yield "needs", (rank, is_forward, needed, action.chunk_id), 0
            if action.op in MEETS[sharding]:
                yield "meet", MEETS[sharding][action.op], action.virtual_stage
            if sends:
                yield "sends", (rank, is_forward, place, action.chunk_id), 0
    yield from padded()
    assert next(paddings, None) is None


def walk(processes):
    """Have processes, by stage and pipeline, do their events, until all are done; all of a stage meet."""
    position, sent = dict.fromkeys(processes, 0), set[Any]()
    moving = True
    while moving:
        moving = False
        for (stage, pipeline), events in processes.items():
            own = (stage, pipeline)
            while position[own] < len(events):
                kind, what, _ = events[position[own]]
                if kind == "needs" and what not in sent:
                    break
                if kind == "meet":
                    others = [each for each in processes if each[0] == stage]
                    there = [processes[each][position[each] : position[each] + 1] for each in others]
                    if any(each != there[0] for each in there):
                        break
                    for each in others:
                        position[each] += each != own
                if kind == "sends":
                    sent.add(what)
                position[own] += 1
                moving = True
    stuck = {each: processes[each][at] for each, at in position.items() if at < len(processes[each])}
    assert not stuck, "a deadlock"


def slots_of(step, ranks, stage, sharding, *, only_forwards):
    """What a stage of some ranks meets for, by the slots of the plan alone."""
    found = {}
    for rank in ranks:
        for action, slot in zip(step.actions[rank, stage], step.slots[rank, stage], strict=True):
            if action.op in MEETS[sharding] and (not only_forwards or action.op in ("forward", "forward_kv")):
                found[slot] = ("meet", MEETS[sharding][action.op], action.virtual_stage)
    return [found[slot] for slot in sorted(found)]


def check(plan, dp, sharding, *, only_forwards):
    pipeline = one_pipeline(plan)
    for step in plan.iter_steps():
        work = StepWork(step, [], plan, reduces_early=False)
        processes = {}
        for number in range(dp * plan.config.pp):
            layout = replace(pipeline, dp=dp, process=number)
            events = list(events_of(work, layout, sharding, only_forwards=only_forwards))
            processes[layout.stage, layout.replica] = events
            rounds = zip(*layout.rows(plan.config.dp), strict=True)
            expected = [
                each
                for ranks in rounds
                for each in slots_of(step, ranks, layout.stage, sharding, only_forwards=only_forwards)
            ]
            assert [event for event in events if event[0] == "meet"] == expected
        walk(processes)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_on_any_number_of_processes_all_meet_in_the_slots_of_the_plan(tmp_path, pipeline):
    """Of any sharding, in a step and in an evaluation; no process deadlocks."""
    plan = make_plan(tmp_path, **PIPELINES[pipeline])
    for dp in (1, 2, 4):
        check(plan, dp, "gradients", only_forwards=False)
        check(plan, dp, "weights", only_forwards=False)
        check(plan, dp, "weights", only_forwards=True)


@pytest.mark.soak
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("dp", [6, 8])
def test_on_any_divisor_of_more_ranks_too(tmp_path, pipeline, dp):
    """Some of which have nothing to do."""
    plan = make_plan(tmp_path, **PIPELINES[pipeline], dp=dp, last_batch="keep")
    for divisor in (each for each in range(1, dp + 1) if dp % each == 0):
        for sharding in ("gradients", "weights"):
            check(plan, divisor, sharding, only_forwards=False)
        check(plan, divisor, "weights", only_forwards=True)


def test_ranks_that_share_sequences_meet_in_the_slots_too(tmp_path):
    plan = make_plan(tmp_path, cp="auto")
    assert any(chunk.cp_size > 1 for step in plan.iter_steps() for each in step.chunks.values() for chunk in each)
    for sharding in ("gradients", "weights"):
        check(plan, 4, sharding, only_forwards=False)


def test_a_slot_in_which_nobody_of_a_round_acts_is_left_out(tmp_path):
    """On one process for two ranks each, of which one has more to do than the others."""
    plan = make_plan(tmp_path)
    step = next(plan.iter_steps())
    work, layout = StepWork(step, [], plan, reduces_early=False), RankLayout(dp=2)
    rounds = [slots_of(step, ranks, 0, "weights", only_forwards=False) for ranks in ((0, 2), (1, 3))]
    whole = slots_of(step, (0, 1, 2, 3), 0, "weights", only_forwards=False)
    assert all(len(each) <= len(whole) for each in rounds) and sum(map(len, rounds)) < 2 * len(whole)
    own = sum(len(step.actions[rank, 0]) for rank in (0, 1))
    paddings = sum(map(len, dummy_collectives(work, layout, "weights")))
    assert own + paddings == sum(map(len, rounds))


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (lambda slots: slots[:-1], "without slots that go up"),
        (lambda slots: [slots[1], slots[0], *slots[2:]], "without slots that go up"),
        (lambda slots: [], "without slots that go up"),
    ],
)
def test_slots_that_processes_cannot_walk_through_are_refused(tmp_path, slots, message):
    """By all of them, before the first one fetches anything."""
    plan = make_plan(tmp_path)
    step = next(plan.iter_steps())
    step.slots[2, 0] = slots(step.slots[2, 0])
    for rank in range(4):
        with pytest.raises(DataError, match=message) as refused:
            dummy_collectives(StepWork(step, [], plan, reduces_early=False), RankLayout(dp=4, process=rank), "weights")
        assert "chunkplan validate" in refused.value.hint


def test_several_ops_in_a_slot_are_refused(tmp_path):
    plan = make_plan(tmp_path)
    step = next(plan.iter_steps())
    for rank in range(4):
        step.slots[rank, 0] = list(range(len(step.actions[rank, 0])))
    with pytest.raises(DataError, match="several ops in slot"):
        dummy_collectives(StepWork(step, [], plan, reduces_early=False), RankLayout(dp=4), "weights")
