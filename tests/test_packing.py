"""Packing and its lower bound."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chunkplan.packing.best_fit_decreasing import best_fit_decreasing
from chunkplan.packing.bounds import lower_bound

CAPACITIES = st.integers(1, 60)


@st.composite
def items_and_capacity(draw: st.DrawFn, max_items: int = 60) -> tuple[np.ndarray, int]:
    capacity = draw(CAPACITIES)
    items = draw(st.lists(st.integers(1, capacity), max_size=max_items))
    return np.array(items, np.int32), capacity


def naive_best_fit_decreasing(items: np.ndarray, capacity: int) -> list[int]:
    """One item after the other, by definition; returns the loads of the bins."""
    room: list[int] = []
    for item in sorted(items.tolist(), reverse=True):
        fitting = [place for place in range(len(room)) if room[place] >= item]
        if fitting:
            best = min(fitting, key=lambda place: room[place])
            room[best] -= item
        else:
            room.append(capacity - item)
    return sorted(capacity - left for left in room)


def fewest_bins(items: list[int], capacity: int) -> int:
    """The optimum, by trying every assignment (symmetric ones once)."""

    def solve(rest: list[int], rooms: tuple[int, ...], best: int) -> int:
        if len(rooms) >= best:
            return best
        if not rest:
            return len(rooms)
        item, *others = rest
        for place, room in enumerate(rooms):
            if room >= item and room not in rooms[:place]:
                best = solve(others, (*rooms[:place], room - item, *rooms[place + 1 :]), best)
        return solve(others, (*rooms, capacity - item), best)

    return solve(sorted(items, reverse=True), (), len(items) + 1)


@given(items_and_capacity())
def test_every_item_lies_in_one_bin_and_no_bin_overflows(case: tuple[np.ndarray, int]) -> None:
    items, capacity = case
    bins = best_fit_decreasing(items, capacity)
    assert bins.shape == items.shape
    loads = np.bincount(bins, weights=items)
    assert (loads <= capacity).all()
    assert (loads > 0).all(), "bins are numbered without gaps"


@given(items_and_capacity())
def test_the_histogram_packs_as_the_definition_does(case: tuple[np.ndarray, int]) -> None:
    items, capacity = case
    loads = np.bincount(best_fit_decreasing(items, capacity), weights=items)
    assert sorted(loads.astype(int).tolist()) == naive_best_fit_decreasing(items, capacity)


@given(items_and_capacity(max_items=8))
def test_the_bound_never_exceeds_the_optimum_nor_the_optimum_the_packing(case: tuple[np.ndarray, int]) -> None:
    items, capacity = case
    optimum = fewest_bins(items.tolist(), capacity)
    packed = len(set(best_fit_decreasing(items, capacity).tolist()))
    assert -(-int(items.sum()) // capacity) <= lower_bound(items, capacity) <= optimum <= packed


def test_the_bound_sees_more_than_the_sum() -> None:
    """Three items just over half need three bins, though their sum would fit two; 1s beside them fit in the room."""
    assert lower_bound(np.array([6, 6, 6, 4, 4, 4]), 10) == 3
    assert lower_bound(np.array([6, 6, 6, 5]), 10) == 4
    assert lower_bound(np.array([], np.int32), 10) == 0
