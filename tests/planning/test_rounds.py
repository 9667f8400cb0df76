"""Rounds of groups of ranks: every sequence once, no rank empty or over its cap, groups aligned, the whole balanced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan.planning.rounds import plan_rounds


def groups_of(ranks: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """The ranks that have the same sequences in a round."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, places in enumerate(ranks):
        groups.setdefault(tuple(places), []).append(rank)
    return groups


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=60),
    st.sampled_from([1, 2, 4, 6, 8, 14]),
    st.integers(20, 200),
    st.integers(1, 2),
    st.sampled_from([1, 2]),
    st.sampled_from([None, 4]),
)
def test_rounds_keep_what_trainers_ask_for(
    lengths: list[int], ranks: int, cap: int, multiple: int, least_size: int, most: int | None
) -> None:
    tokens = np.array(lengths)
    if tokens.max() > ranks * cap or least_size > ranks:
        return
    options = {"multiple": multiple, "least_size": least_size, "most_sequences": most}
    plan = plan_rounds(tokens, tokens**2, ranks, cap, **options)
    if plan is None:  # only where so many rounds would leave one without a sequence, or a group with too many
        assert multiple > 1 or most is not None
        return
    assert len(plan) % multiple == 0 and all(len(of_round) == ranks for of_round in plan)
    placed = [place for of_round in plan for places in groups_of(of_round) for place in places]
    assert sorted(placed) == list(range(len(lengths)))
    for of_round in plan:
        for places, members in groups_of(of_round).items():
            size = len(members)
            assert places and members == list(range(members[0], members[0] + size)) and members[0] % size == 0
            assert size == ranks or (size & (size - 1) == 0 and size >= least_size)
            assert sum(lengths[place] for place in places) <= size * cap
            assert most is None or len(places) <= most
    assert plan == plan_rounds(tokens, tokens**2, ranks, cap, **options)


@pytest.mark.parametrize("ranks", [8, 14, 64])
@pytest.mark.parametrize("seed", range(4))
def test_rounds_of_long_tailed_lengths_are_even(ranks: int, seed: int) -> None:
    """All rounds together take at most 3 % longer than the work divided by the ranks, waiting after each."""
    lengths = np.random.default_rng(seed).lognormal(7, 1.3, 16 * ranks).astype(np.int64).clip(16, 100_000)
    work = lengths * 20_000 + lengths**2
    plan = plan_rounds(lengths, work, ranks, 16384)
    assert plan is not None
    rounds = [
        max(sum(work[list(places)]) / len(members) for places, members in groups_of(each).items()) for each in plan
    ]
    assert sum(rounds) <= 1.03 * work.sum() / ranks
