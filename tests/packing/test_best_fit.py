"""Packing one rank's short sequences, some into chunks that are partly full."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chunkplan.packing.heuristics import best_fit

#: Items, capacity, rooms, which are second choices, the largest item for these.
Case = tuple[list[int], int, list[int], list[bool], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    capacity = draw(st.integers(1, 30))
    items = draw(st.lists(st.integers(1, capacity), max_size=20))
    rooms = draw(st.lists(st.integers(0, capacity), max_size=5))
    second = draw(st.lists(st.booleans(), min_size=len(rooms), max_size=len(rooms)))
    return sorted(items, reverse=True), capacity, rooms, second, draw(st.integers(0, capacity))


def pack(
    items: list[int], capacity: int, rooms: list[int], second: list[bool], largest_second: int
) -> tuple[list[int], int]:
    bins, num_bins = best_fit(
        np.array(items, np.int64), capacity, np.array(rooms, np.int64), np.array(second, bool), largest_second
    )
    return bins.tolist(), num_bins


@given(cases())
def test_no_bin_overflows_and_new_ones_are_numbered_on(case: Case) -> None:
    items, capacity, rooms, _, _ = case
    bins, num_bins = pack(*case)
    left = rooms + [capacity] * (num_bins - len(rooms))
    for item, target in zip(items, bins, strict=True):
        left[target] -= item
    assert min(left, default=0) >= 0
    assert all(room < capacity for room in left[len(rooms) :]), "no new bin stays empty"


@given(cases())
def test_every_item_goes_where_least_room_is_left(case: Case) -> None:
    """Among the first choices; else among the second choices; else into a new bin, and then nothing had room."""
    items, capacity, rooms, second, largest_second = case
    left, is_second = list(rooms), list(second)
    for item, target in zip(items, pack(*case)[0], strict=True):
        first_choices = [room for room, late in zip(left, is_second, strict=True) if room >= item and not late]
        second_choices = [
            room for room, late in zip(left, is_second, strict=True) if room >= item and late and item <= largest_second
        ]
        if target == len(left):
            assert not first_choices
            assert not second_choices
            left.append(capacity)
            is_second.append(False)
        else:
            assert left[target] == min(first_choices or second_choices)
        left[target] -= item
