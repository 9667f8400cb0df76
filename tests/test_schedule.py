"""Schedules and their simulation, held against the example every description of ChunkFlow agrees on.

Four stages; sequences of 1, 1, 2 and 4 units; forward 1 and backward 2 a unit; nothing for links.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan.planfile.order import StuckError, execution_order
from chunkplan.schedule import make_schedule
from chunkplan.schedule.actions import ChunkStates, StageActions
from chunkplan.schedule.simulate import simulate

ALONE = -1


def states(groups: list[int], keeps: list[int] | None = None) -> ChunkStates:
    kept = [1] * len(groups) if keeps is None else keeps
    return ChunkStates(group_id=np.array(groups, np.int32), keeps_activations=np.array(kept, bool))


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
    schedule = make_schedule(states(groups, keeps), pp=4)
    assert simulate(schedule, np.array(units)).makespan == makespan


def test_state_aware_1f1b_draws_the_published_gantt() -> None:
    """A = pack of two, D = 2 units, X and Y = the two chunks of the long sequence; small letters backward."""
    schedule = make_schedule(states([ALONE, ALONE, 0, 0]), pp=4)
    ends = simulate(schedule, np.array([2, 2, 2, 2])).ends
    lines = []
    for actions, stage_ends in zip(schedule, ends, strict=True):
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
    [actions] = make_schedule(states([ALONE, 0, 0, 0, 0], [1, 0, 0, 1, 1]), pp=1)
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


def work(actions: StageActions, forward: np.ndarray) -> int:
    weight = {"forward": 1, "forward_kv": 1, "recompute": 1, "backward": 2}
    return sum(weight[op] * int(forward[chunk_id]) for op, chunk_id in actions)


@st.composite
def ranks(draw: st.DrawFn) -> tuple[ChunkStates, np.ndarray]:
    """Some standalone chunks, then some groups of which a random number of last chunks is kept."""
    groups, keeps = [ALONE] * draw(st.integers(0, 5)), [1] * 5
    keeps = keeps[: len(groups)]
    for group in range(draw(st.integers(0 if groups else 1, 3))):
        size = draw(st.integers(2, 6))
        kept = draw(st.integers(1, size))
        groups += [group] * size
        keeps += [0] * (size - kept) + [1] * kept
    forward = draw(st.lists(st.integers(1, 9), min_size=len(groups), max_size=len(groups)))
    return states(groups, keeps), np.array(forward)


@given(ranks(), st.integers(1, 6))
def test_the_simulator_conserves_work_and_never_beats_it(rank: tuple[ChunkStates, np.ndarray], pp: int) -> None:
    chunks, forward = rank
    schedule = make_schedule(chunks, pp)
    simulation = simulate(schedule, forward)
    for actions, end in zip(schedule, simulation.stage_end, strict=True):
        assert work(actions, forward) <= end <= simulation.makespan
    if pp == 1:
        assert simulation.makespan == work(schedule[0], forward)
    kept = [op for op, _ in schedule[0]]
    assert kept.count("recompute") == kept.count("forward_kv") == int((~chunks.keeps_activations).sum())


def test_a_schedule_that_waits_for_itself_is_found_stuck() -> None:
    """Stage 1 wants chunk 1 first, stage 0 wants chunk 0's gradient before it sends chunk 1."""
    stages = [
        [("forward", 0, 0), ("backward", 0, 0), ("forward", 1, 0), ("backward", 1, 0)],
        [("forward", 1, 0), ("backward", 1, 0), ("forward", 0, 0), ("backward", 0, 0)],
    ]
    with pytest.raises(StuckError) as stuck:
        list(execution_order(stages))
    assert (stuck.value.stage, stuck.value.position) == (0, 1)
