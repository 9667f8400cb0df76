"""Links bring what was sent, whatever the order of the work, and no order that the validator accepts deadlocks."""

from __future__ import annotations

import random

import pytest

from chunkplan.cost.rates import UNIT
from chunkplan.layers import StagePlacement
from chunkplan.operations import OPS
from chunkplan.schedule.search import search
from chunkplan_runtime.layout import RankLayout
from tests.support.link_cases import Pipeline, drive, random_chunks, random_order
from tests.support.schedule_checks import ALONE, make_rank, template
from tests.support.wait_cases import drive_waiting

PP = 4
LAYOUT = RankLayout(pp=PP)


def check(pool, pipelines, hidden_size=3, **how):
    for wrong, left in pool.run(how.pop("pp", PP), drive, pipelines=pipelines, hidden_size=hidden_size, **how):
        assert not wrong
        assert not left


def random_pipeline(seed, most_units=6, layout=LAYOUT):
    chance = random.Random(seed)
    num_tokens, groups, keeps = random_chunks(chance, most_units)
    return Pipeline(num_tokens, groups, random_order(chance, groups, keeps, layout))


def planned_pipeline(seed, schedule, most_units=5):
    num_tokens, groups, keeps = random_chunks(random.Random(seed), most_units)
    rank = make_rank(num_tokens, [ALONE if group is None else group for group in groups], keeps, [1] * PP, UNIT)
    actions = template(rank, PP) if schedule == "1f1b" else search(*rank, PP, None).actions
    return Pipeline(num_tokens, groups, _stages(actions))


def _stages(actions):
    pairs = [(OPS[op], int(chunk), 0) for op, chunk in zip(actions.ops, actions.chunk_ids, strict=True)]
    return [pairs[start:stop] for start, stop in zip(actions.stages[:-1], actions.stages[1:], strict=True)]


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 200), marks=pytest.mark.soak)])
def test_random_orders_bring_the_right_tensors_and_end(pool, seeds):
    check(pool, [random_pipeline(seed, most_units=4) for seed in seeds])


@pytest.mark.parametrize("placement", [StagePlacement(2), StagePlacement(3), StagePlacement(2, True)])
@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 150), marks=pytest.mark.soak)])
def test_random_orders_of_virtual_stages_bring_the_right_tensors_and_end(pool, seeds, placement):
    """Two stages of these have several links between them, and in a V one that no process group is for."""
    for pp in (2, 3):
        layout = RankLayout(1, pp, 0, placement)
        pipelines = [random_pipeline(seed, most_units=3, layout=layout) for seed in seeds]
        check(pool, pipelines, pp=pp, placement=placement)


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 25), marks=pytest.mark.soak)])
@pytest.mark.parametrize("schedule", ["1f1b", "search"])
def test_schedules_of_the_planner_bring_the_right_tensors_and_end(pool, schedule, seeds):
    check(pool, [planned_pipeline(seed, schedule) for seed in seeds])


def test_tens_of_chunks_in_flight_end(pool):
    num_chunks = 80
    forwards = [("forward", chunk_id, 0) for chunk_id in range(num_chunks)]
    backwards = [("backward", chunk_id, 0) for chunk_id in reversed(range(num_chunks))]
    all_first = [[*forwards, *backwards] for _ in range(PP)]
    check(pool, [Pipeline([2] * num_chunks, [None] * num_chunks, all_first)])
    check(pool, [random_pipeline(1000, most_units=60)])


def test_stages_that_wait_for_their_devices_before_every_forward_end(pool):
    """On a GPU a receive that is posted early would be waited for by what has to come before its tensor is sent."""
    forwards, backwards = ([(op, chunk_id, 0) for chunk_id in range(2)] for op in ("forward", "backward"))
    one_by_one = [("forward", 0, 0), ("backward", 0, 0), ("forward", 1, 0), ("backward", 1, 0)]
    pipelines = [Pipeline([4, 4], [None, None], [[*forwards, *backwards], one_by_one])]
    assert pool.run(2, drive_waiting, pipelines=pipelines, hidden_size=8) == [([], [])] * 2


def test_tensors_larger_than_any_buffer_end(pool):
    """Of 1 to 4 MB: a send that waited for its receive would wait for ever where both ends send first."""
    pipelines = [random_pipeline(seed, most_units=4) for seed in range(2000, 2002)] + [planned_pipeline(7, "1f1b")]
    check(pool, pipelines, hidden_size=200_000)


@pytest.mark.parametrize(
    "action, named", [(("forward", 7, 0), "chunk 7"), (("forward", 0, 1), "chunk 0 on virtual stage 1")]
)
def test_what_the_plan_does_not_have_is_refused_by_its_name(pool, action, named):
    with pytest.raises(AssertionError, match=rf"DataError: .*forward of {named}, which does not exist"):
        pool.run(PP, drive, pipelines=[Pipeline([2], [None], [[action]] * PP)], hidden_size=3)


def test_a_chunk_that_a_stage_hands_to_itself_too_late_is_refused(pool):
    """The last stage of a V has two model stages that follow each other."""
    layout = RankLayout(1, 2, 0, StagePlacement(2, True))
    first, last = random_order(random.Random(0), [None], [True], layout)
    assert last[:2] == [("forward", 0, 0), ("forward", 0, 1)]
    how = {"hidden_size": 3, "placement": StagePlacement(2, True)}
    check(pool, [Pipeline([2], [None], [first, last])], pp=2, **how)
    wrong = [last[1], last[0], *last[2:]]
    with pytest.raises(AssertionError, match="chunk 0 comes to a virtual stage before the one before it has done it"):
        pool.run(2, drive, pipelines=[Pipeline([2], [None], [first, wrong])], **how)
