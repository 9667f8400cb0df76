"""Zero-bubble schedules keep every invariant of state-aware ones, cost no more memory than 1F1B, and no more time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from chunkplan.cost.durations import ChunkTimes
from chunkplan.layers import STRAIGHT
from chunkplan.operations import OPS
from chunkplan.planfile.chunks import chunks_without_segments
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.auto import BASELINE_MEMORY, auto
from chunkplan.schedule.holdings import peak_retained
from chunkplan.schedule.simulate import simulate
from tests.support.schedule_checks import Rank, example, look, ranks, template


def scheduled(rank: Rank, pp: int) -> Actions:
    return auto(*rank, pp, BASELINE_MEMORY, 0, True)[0]


def split_at_once(rank: Rank, pp: int) -> Actions:
    """State-aware 1F1B with each backward as its halves, one directly after the other."""
    whole = template(rank, pp)
    ops: list[int] = []
    chunk_ids: list[int] = []
    for op, chunk in zip(whole.ops.tolist(), whole.chunk_ids.tolist(), strict=True):
        halves = [OPS.index("backward_input"), OPS.index("backward_weight")] if OPS[op] == "backward" else [op]
        ops += halves
        chunk_ids += [chunk] * len(halves)
    stages = whole.stages + np.arange(pp + 1) * rank.chunks.num_tokens.size
    return Actions(np.array(ops, np.int8), np.array(chunk_ids, np.int32), np.zeros(len(ops), np.int32), stages)


@given(ranks(most_units=8))
@settings(max_examples=200)
def test_zero_bubble_keeps_all_invariants_within_the_memory_and_the_time_of_1f1b(drawn: tuple[Rank, int]) -> None:
    rank, pp = drawn
    actions = scheduled(rank, pp)
    end, peaks = look(rank, pp, actions)
    assert max(peaks) <= max(look(rank, pp, template(rank, pp))[1])
    assert end <= simulate(rank.chunks, split_at_once(rank, pp), rank.times, pp, STRAIGHT, 1).max()
    assert peak_retained(rank.chunks, actions).tolist() == peaks


@pytest.mark.parametrize(
    ("name", "end"), [("C = 2 units, K = 2", 32), ("C = 2 units, K = 1", 34), ("C = 1 unit, K = 4", 30), ("uncut", 40)]
)
def test_on_the_published_example_a_third_less_time_or_so_than_1f1b(name: str, end: int) -> None:
    """1F1B takes 46, 48, 41 and 56."""
    rank = example(name)
    assert look(rank, 4, scheduled(rank, 4))[0] == end


def test_halves_of_a_group_leave_room_for_its_recomputes() -> None:
    """Of a group of four only one is held at a time: each weight half comes before the next recompute."""
    chunks = chunks_without_segments([0, 4], 1, 0, [False, False, False, True])
    rank = Rank(chunks, ChunkTimes(np.ones((len(OPS), 2, 4), np.int64), np.zeros(4, np.int64)))
    actions = scheduled(rank, 2)
    look(rank, 2, actions)
    first = [OPS[op] for op in actions.ops[: actions.stages[1]]]
    assert first[4:] == [
        *["backward_input", "backward_weight"],
        *["recompute", "backward_input", "backward_weight"] * 3,
    ]
