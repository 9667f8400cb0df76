"""Sequences over ranks."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chunkplan.balance.exchange import best_exchange, even_out, least_gain
from chunkplan.balance.longest_processing_time import spread

DESCENDING = st.lists(st.integers(1, 50), min_size=1, max_size=7).map(lambda work: sorted(work, reverse=True))


def loads(work: np.ndarray, rank_of: np.ndarray, dp: int) -> np.ndarray:
    return np.bincount(rank_of, weights=work, minlength=dp)


@given(DESCENDING, st.integers(1, 3))
def test_the_heaviest_rank_is_within_four_thirds_of_the_best_possible(work: list[int], dp: int) -> None:
    array = np.array(work, np.int64)
    heaviest = loads(array, spread(array, dp), dp).max()
    best = min(loads(array, np.array(ranks), dp).max() for ranks in product(range(dp), repeat=len(work)))
    assert best <= heaviest <= (4 / 3) * best


def test_costs_count_rather_than_numbers() -> None:
    """One long sequence has a rank to itself."""
    assert spread(np.array([6, 1, 1, 1, 1], np.int64), 2).tolist() == [0, 1, 1, 1, 1]


def test_ties_are_broken_by_position_so_that_a_plan_is_the_same_everywhere() -> None:
    assert spread(np.full(5, 7, np.int64), 2).tolist() == [0, 1, 0, 1, 0]


def test_more_ranks_than_sequences_leave_the_last_ones_without() -> None:
    assert spread(np.array([3, 2], np.int64), 5).tolist() == [0, 1]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.integers(1, 6), st.data())
def test_exchanges_never_make_the_heaviest_rank_heavier(values: list[int], dp: int, data: st.DataObject) -> None:
    work = np.array(sorted(values, reverse=True), np.int64)
    rank_of = np.array(data.draw(st.lists(st.integers(0, dp - 1), min_size=work.size, max_size=work.size)), np.int64)
    before = loads(work, rank_of, dp)
    even_out(work, rank_of, dp)
    after = loads(work, rank_of, dp)
    assert after.max() <= before.max()
    assert after.sum() == before.sum()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.data())
def test_the_best_exchange_is_the_best_of_all(values: list[int], data: st.DataObject) -> None:
    """Against trying every single sequence to give and every one, or none, to take."""
    work = np.array(sorted(values, reverse=True), np.int64)
    rank_of = np.array(data.draw(st.lists(st.integers(0, 1), min_size=work.size, max_size=work.size)), np.int64)
    gap = int(work[rank_of == 0].sum() - work[rank_of == 1].sum())
    if gap <= 0:
        return
    choices = {
        (given_, taken): int(work[given_] - (work[taken] if taken >= 0 else 0))
        for given_ in np.flatnonzero(rank_of == 0).tolist()
        for taken in [-1, *np.flatnonzero(rank_of == 1).tolist()]
    }
    left = {choice: max(abs(gap - 2 * moved), 0) for choice, moved in choices.items() if 0 < moved < gap}
    found = best_exchange(work, rank_of, 0, 1, gap, 1)
    if not left:
        assert found[0] == -1
    else:
        assert left[found] == min(left.values())


def test_an_exchange_has_to_be_worth_it() -> None:
    assert least_gain(np.array([4096 * 100, 4096 * 300], np.int64)) == 200
    work, rank_of = np.array([10, 9], np.int64), np.array([0, 1], np.int64)
    assert best_exchange(np.array([10, 9, 3], np.int64), np.array([0, 1, 0], np.int64), 0, 1, 4, 1) == (0, 1)
    assert best_exchange(work, rank_of, 0, 1, 1, 1)[0] == -1
