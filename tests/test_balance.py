"""Sequences over ranks."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chunkplan.balance import spread


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_the_heaviest_rank_is_within_four_thirds_of_the_best_possible(costs: list[int], dp: int) -> None:
    array = np.array(costs, np.int64)
    heaviest = np.bincount(spread(array, dp), weights=array).max()
    best = min(np.bincount(ranks, weights=array).max() for ranks in product(range(dp), repeat=len(costs)))
    assert best <= heaviest <= (4 / 3) * best


def test_the_dearest_go_first_and_costs_count_rather_than_numbers() -> None:
    """One long sequence has a rank to itself; in any other order, or by number, it would share."""
    assert spread(np.array([1, 1, 1, 1, 6], np.int64), 2).tolist() == [1, 1, 1, 1, 0]


def test_ties_are_broken_by_position_so_that_a_plan_is_the_same_everywhere() -> None:
    assert spread(np.full(5, 7, np.int64), 2).tolist() == [0, 1, 0, 1, 0]
