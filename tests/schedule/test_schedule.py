"""Schedules and their simulation, held against the example every description of ChunkFlow agrees on.

Four stages; sequences of 1, 1, 2 and 4 units; forward 1 and backward 2 a unit; nothing for links.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan.cost.durations import ChunkTimes, chunk_times
from chunkplan.cost.rates import UNIT
from chunkplan.layers import STRAIGHT
from chunkplan.operations import OPS
from chunkplan.planfile.chunks import chunks_without_segments
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.families import schedule_ranks
from chunkplan.schedule.simulate import simulate

ALONE = -1


def unit_times(units: list[int], num_model_stages: int) -> ChunkTimes:
    return chunk_times(np.array(units), np.zeros(len(units)), UNIT, [1] * num_model_stages)


class Rank:
    """The schedule of one rank, as lists."""

    def __init__(
        self,
        groups: list[int],
        keeps: list[int] | None,
        pp: int,
        units: list[int],
        schedule: str | None = None,
        num_virtual: int = 1,
    ) -> None:
        chunks = chunks_without_segments([0, len(groups)], units, groups, True if keeps is None else keeps)
        schedule = schedule or ("algorithm2" if pp == 1 else "1f1b")
        found = schedule_ranks(chunks, unit_times(units, pp * num_virtual), pp, schedule, None, str)
        self.actions, self.stage_end = found.actions, found.stage_end
        named = [(OPS[op], int(chunk)) for op, chunk in zip(self.actions.ops, self.actions.chunk_ids, strict=True)]
        borders = self.actions.stages[1:-1]
        self.stages = [[named[i] for i in part] for part in np.split(np.arange(len(named)), borders)]
        self.ends = [part.tolist() for part in np.split(found.ends, borders)]

    @property
    def makespan(self) -> int:
        return int(self.stage_end.max())


@pytest.mark.parametrize(
    ("units", "groups", "keeps", "makespan"),
    [
        pytest.param([2, 2, 2, 2], [ALONE] * 4, None, 42, id="four equal micro-batches"),
        pytest.param([4, 2, 1, 1], [ALONE] * 4, None, 56, id="the sequences as they are"),
        pytest.param([4, 1, 2, 1], [ALONE] * 4, None, 56, id="the sequences in another order"),
        pytest.param([2, 2, 2, 2], [ALONE, ALONE, 0, 0], [1, 1, 1, 1], 46, id="C = 2 units, K = 2"),
        pytest.param([2, 2, 2, 2], [ALONE, ALONE, 0, 0], [1, 1, 0, 1], 48, id="C = 2 units, K = 1"),
        pytest.param([4, 4], [ALONE] * 2, None, 60, id="C = 4 units, K = 1"),
    ],
)
def test_state_aware_1f1b_takes_the_published_time(
    units: list[int], groups: list[int], keeps: list[int] | None, makespan: int
) -> None:
    assert Rank(groups, keeps, 4, units).makespan == makespan


def test_state_aware_1f1b_draws_the_published_gantt() -> None:
    """A = pack of two, D = 2 units, X and Y = the two chunks of the long sequence; small letters backward."""
    rank = Rank([ALONE, ALONE, 0, 0], None, 4, [2, 2, 2, 2])
    lines = []
    for actions, stage_ends in zip(rank.stages, rank.ends, strict=True):
        line = ["."] * 46
        for (op, chunk_id), end in zip(actions, stage_ends, strict=True):
            duration, letters = (2, "ADXY") if op == "forward" else (4, "adxy")
            line[end - duration : end] = letters[chunk_id] * duration
        lines.append("".join(line))
    assert lines == [
        "AADDXXYY............aaaa..dddd........yyyyxxxx",
        "..AADDXX........aaaaYYdddd........yyyyxxxx....",
        "....AADD....aaaaXXddddYY......yyyyxxxx........",
        "......AAaaaaDDddddXX....YYyyyyxxxx............",
    ]


def test_algorithm_2_keeps_the_last_k_and_recomputes_in_descending_order() -> None:
    [actions] = Rank([ALONE, 0, 0, 0, 0], [1, 0, 0, 1, 1], 1, [1] * 5).stages
    assert actions == [
        ("forward", 0),
        ("backward", 0),
        ("forward_kv", 1),
        ("forward_kv", 2),
        ("forward", 3),
        ("forward", 4),
        ("backward", 4),
        ("backward", 3),
        ("recompute", 2),
        ("backward", 2),
        ("recompute", 1),
        ("backward", 1),
    ]


def work(actions: list[tuple[str, int]], forward: list[int]) -> int:
    weight = {"forward": 1, "forward_kv": 1, "recompute": 1, "backward": 2}
    return sum(weight[op] * forward[chunk_id] for op, chunk_id in actions)


@st.composite
def chunks_of_a_rank(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Some standalone chunks, then some groups of which a random number of last chunks is kept; forward times."""
    groups, keeps = [ALONE] * draw(st.integers(0, 5)), [1] * 5
    keeps = keeps[: len(groups)]
    for group in range(draw(st.integers(0 if groups else 1, 3))):
        size = draw(st.integers(2, 6))
        kept = draw(st.integers(1, size))
        groups += [group] * size
        keeps += [0] * (size - kept) + [1] * kept
    return groups, keeps, draw(st.lists(st.integers(1, 9), min_size=len(groups), max_size=len(groups)))


@given(chunks_of_a_rank(), st.integers(1, 6))
def test_the_simulator_conserves_work_and_never_beats_it(
    chunks: tuple[list[int], list[int], list[int]], pp: int
) -> None:
    groups, keeps, forward = chunks
    rank = Rank(groups, keeps, pp, forward)
    for actions, ends, end in zip(rank.stages, rank.ends, rank.stage_end, strict=True):
        assert work(actions, forward) <= ends[-1] == end <= rank.makespan
    if pp == 1:
        assert rank.makespan == work(rank.stages[0], forward)
    ops = [op for op, _ in rank.stages[0]]
    assert ops.count("recompute") == ops.count("forward_kv") == keeps.count(0)


@given(chunks_of_a_rank(), st.integers(2, 5), st.integers(1, 4))
def test_interleaved_stages_do_the_work_of_all_their_parts_and_never_deadlock(
    chunks: tuple[list[int], list[int], list[int]], pp: int, num_virtual: int
) -> None:
    groups, keeps, forward = chunks
    rank = Rank(groups, keeps, pp, forward, "interleaved", num_virtual)
    for actions, ends, end in zip(rank.stages, rank.ends, rank.stage_end, strict=True):
        assert work(actions, forward) == num_virtual * work(Rank(groups, keeps, 1, forward).stages[0], forward)
        assert work(actions, forward) <= ends[-1] == end <= rank.makespan


def test_interleaved_parts_fill_and_drain_a_pipeline_sooner() -> None:
    """Eight equal chunks on four stages: the bubble is 3 of 8 chunks' time, and with v parts 1/v of that."""
    times = [Rank([ALONE] * 8, None, 4, [1] * 8, "interleaved", parts).makespan / parts for parts in (1, 2, 3)]
    assert times == [24 + 9, 24 + 9 / 2, 24 + 9 / 3]


def test_stages_stay_ahead_of_the_last_one_after_a_group() -> None:
    """Three groups of two chunks, then standalone ones: in lockstep the last stage would wait almost half the time."""
    rank = Rank([0, 0, 1, 1, 2, 2] + [ALONE] * 6, None, 4, [1] * 12)
    arrival = 3
    assert work(rank.stages[3], [1] * 12) >= 0.9 * (rank.ends[3][-1] - arrival)


@given(st.lists(chunks_of_a_rank(), min_size=1, max_size=4), st.integers(1, 4))
def test_ranks_are_scheduled_together_as_they_are_alone(
    ranks: list[tuple[list[int], list[int], list[int]]], pp: int
) -> None:
    groups, keeps, units = ([each for rank in ranks for each in rank[part]] for part in range(3))
    first = np.cumsum([0, *(len(rank[0]) for rank in ranks)])
    chunks = chunks_without_segments(first, units, groups, keeps)
    schedule = "algorithm2" if pp == 1 else "1f1b"
    found = schedule_ranks(chunks, unit_times(units, pp), pp, schedule, None, str)
    alone = [Rank(*rank[:2], pp, rank[2]) for rank in ranks]
    assert found.actions.ops.tolist() == [op for rank in alone for op in rank.actions.ops]
    assert found.actions.chunk_ids.tolist() == [chunk for rank in alone for chunk in rank.actions.chunk_ids]
    assert found.stage_end.tolist() == [end for rank in alone for end in rank.stage_end]


def test_what_waits_for_itself_is_never_done() -> None:
    """Stage 1 wants chunk 1 first, stage 0 wants chunk 0's gradient before it sends chunk 1."""
    forward, backward = OPS.index("forward"), OPS.index("backward")
    actions = Actions(
        ops=np.array([forward, backward] * 4, np.int8),
        chunk_ids=np.array([0, 0, 1, 1, 1, 1, 0, 0], np.int32),
        virtual_stages=np.zeros(8, np.int32),
        stages=np.array([0, 4, 8]),
    )
    chunks = chunks_without_segments([0, 2], 1)
    assert simulate(chunks, actions, unit_times([1, 1], 2), 2, STRAIGHT, 1).tolist() == [1, -1, -1, -1, -1, -1, -1, -1]
