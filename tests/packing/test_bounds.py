"""Lower bounds: none exceeds the optimum, and each sees what the ones before it do not."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkplan.packing import pack_lengths
from chunkplan.packing.heuristics import martello_toth, martello_toth_counted
from chunkplan.packing.histogram import histogram
from chunkplan.packing.relaxation import VALUE_UNITS, bound_by_values, relaxed_bound, solve_relaxation


@st.composite
def items_and_capacity(draw: st.DrawFn, max_items: int = 40) -> tuple[np.ndarray, int]:
    """Of any length, of two to four to a bin, or cut from full bins, where a bound a little too high is wrong."""
    capacity = draw(st.one_of(st.integers(4, 60), st.sampled_from([8192, 10_081, 100_003, 2**31 - 1])))
    shape = draw(st.sampled_from(["any", "large", "cut"]))
    count = draw(st.integers(1, max_items // 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if shape == "any":
        items = rng.integers(1, capacity + 1, 4 * count)
    elif shape == "large":
        items = rng.integers(capacity // 5 + 1, capacity // 2 + 2, 4 * count)
    else:
        items = np.diff(np.sort(rng.integers(0, capacity + 1, (count, 3))), prepend=0, append=capacity).ravel()
    return np.maximum(items, 1) if shape != "cut" else items[items > 0], capacity


def lower_bound(items: np.ndarray, capacity: int) -> int:
    """L2."""
    counted = histogram(items)
    return martello_toth_counted(counted.distinct, counted.counts, capacity)


def certified_lower_bound(items: np.ndarray, capacity: int) -> int:
    """L2 where a packing meets it, else at least what the linear relaxation proves."""
    return pack_lengths(items, capacity, "mbs").lower_bound


def l2_by_definition(items: np.ndarray, capacity: int) -> int:
    best = 0
    for threshold in range(capacity // 2 + 1):
        alone = int((items > capacity - threshold).sum())
        large = items[(items > capacity // 2) & (items <= capacity - threshold)]
        small = int(items[(items <= capacity // 2) & (items >= threshold)].sum())
        rest = small - (large.size * capacity - int(large.sum()))
        best = max(best, alone + large.size + max(0, -(-rest // capacity)))
    return best


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 60), st.integers(0, 40), st.integers(0, 2**32))
def test_l2_is_as_defined_for_items_and_for_their_histogram(capacity: int, count: int, seed: int) -> None:
    items = np.random.default_rng(seed).integers(1, capacity + 1, count)
    expected = l2_by_definition(items, capacity)
    assert martello_toth(np.sort(items), capacity) == expected
    assert lower_bound(items, capacity) == expected >= -(-int(items.sum()) // capacity)


def test_l2_sees_more_than_the_sum() -> None:
    """Three items just over half need three bins, though their sum would fit two; 4s beside them fit in the room."""
    assert lower_bound(np.array([6, 6, 6, 4, 4, 4]), 10) == 3
    assert lower_bound(np.array([6, 6, 6, 5]), 10) == 4
    assert lower_bound(np.array([], np.int32), 10) == 0
    assert certified_lower_bound(np.array([], np.int32), 10) == 0


@settings(max_examples=60, deadline=None)
@given(items_and_capacity(max_items=8), st.data())
def test_any_values_prove_a_bound(case: tuple[np.ndarray, int], data: st.DataObject) -> None:
    items, capacity = case
    counted = histogram(items)
    size = counted.distinct.size
    values = data.draw(st.lists(st.integers(0, VALUE_UNITS), min_size=size, max_size=size))
    optimum = pack_lengths(items, capacity, "exact")
    assert optimum.optimal
    assert 1 <= bound_by_values(counted, np.array(values, np.int64), capacity) <= optimum.num_bins


@settings(max_examples=60, deadline=None)
@given(items_and_capacity())
def test_no_bound_exceeds_any_packing(case: tuple[np.ndarray, int]) -> None:
    items, capacity = case
    certified = certified_lower_bound(items, capacity)
    assert lower_bound(items, capacity) <= certified
    for algorithm in ("bfd", "mbs", "column-generation"):
        num_bins = pack_lengths(items, capacity, algorithm).num_bins
        assert certified <= num_bins
        assert relaxed_bound(histogram(items), capacity) <= num_bins


def test_the_relaxation_sees_more_than_counting() -> None:
    """Seven items of 3 and 5 of 4 fill 10s by the sum, but 3 + 3 + 4 is the only way to fill one."""
    items = np.array([3] * 30 + [4] * 50)
    assert lower_bound(items, 10) == 29
    assert certified_lower_bound(items, 10) == pack_lengths(items, 10).num_bins == 33
    assert certified_lower_bound(items * 200_000_000, 2_000_000_000) == 33, "also where lengths are rounded"


def test_the_relaxation_uses_patterns_that_hold_every_item_and_fit() -> None:
    sizes, counts = np.array([2, 3, 5, 7]), np.array([11, 7, 5, 3])
    relaxation = solve_relaxation(sizes, counts, 10)
    held = np.zeros(4)
    for pattern, times in zip(relaxation.patterns, relaxation.used, strict=True):
        assert sizes[pattern].sum() <= 10
        np.add.at(held, pattern, times)
    assert (held >= counts - 1e-6).all()
    assert np.isclose(relaxation.used.sum(), counts @ relaxation.values / VALUE_UNITS, rtol=1e-2)
