"""Packing: what every packer guarantees, and what each adds to that."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkplan.errors import UsageError
from chunkplan.packing import PACKERS, Packing, pack_lengths
from chunkplan.packing.histogram import histogram
from chunkplan.packing.packing import close_gap

EVERY_PACKER = pytest.mark.parametrize("algorithm", PACKERS)
LARGEST = 2**31 - 1


@st.composite
def items_and_capacity(draw: st.DrawFn, max_items: int = 60) -> tuple[np.ndarray, int]:
    """Of any length, of two to four to a bin, close to unit fractions of a bin, or cut from full bins."""
    capacity = draw(st.one_of(st.integers(1, 60), st.sampled_from([2047, 8192, 65536, LARGEST])))
    shape = draw(st.sampled_from(["any", "large", "fractions", "cut"]))
    count = draw(st.integers(0, max_items))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if shape == "any":
        items = rng.integers(1, capacity + 1, count)
    elif shape == "large":
        items = rng.integers(capacity // 5 + 1, capacity // 2 + 2, count)
    elif shape == "fractions":
        items = capacity // rng.integers(1, 8, count) + rng.integers(-1, 2, count)
    else:
        cuts = np.sort(rng.integers(0, capacity + 1, (count // 4, 3)))
        items = np.diff(cuts, prepend=0, append=capacity).ravel()
    items = np.clip(items, 1, capacity)
    return items.astype(draw(st.sampled_from([np.int32, np.int64]))), capacity


def gap(packing: Packing) -> float:
    """The share of bins over the bound; 0 for no items."""
    return packing.num_bins / packing.lower_bound - 1 if packing.num_bins else 0.0


def check(packing: Packing, items: np.ndarray, capacity: int) -> None:
    assert packing.bin_of.shape == items.shape
    loads = np.bincount(packing.bin_of, weights=items, minlength=packing.num_bins)
    assert loads.size == packing.num_bins
    assert (loads <= capacity).all()
    assert (loads > 0).all(), "bins are numbered without gaps"
    assert packing.lower_bound <= packing.num_bins
    assert packing.optimal == (gap(packing) == 0)


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


@EVERY_PACKER
@settings(max_examples=40, deadline=None)
@given(case=items_and_capacity(max_items=24))
def test_every_item_lies_in_one_bin_no_bin_overflows_and_packing_again_gives_the_same(
    algorithm: str, case: tuple[np.ndarray, int]
) -> None:
    items, capacity = case
    packing = pack_lengths(items, capacity, algorithm)
    check(packing, items, capacity)
    assert packing.num_bins >= pack_lengths(items, capacity, "mbs").lower_bound
    again = pack_lengths(items, capacity, algorithm)
    assert (again.bin_of == packing.bin_of).all()
    assert again.lower_bound == packing.lower_bound


@EVERY_PACKER
@settings(max_examples=40, deadline=None)
@given(case=items_and_capacity(max_items=8))
def test_the_optimum_lies_between_the_bound_and_the_bins(algorithm: str, case: tuple[np.ndarray, int]) -> None:
    items, capacity = case
    packing = pack_lengths(items, capacity, algorithm)
    optimum = fewest_bins(items.tolist(), capacity)
    assert packing.lower_bound <= optimum <= packing.num_bins
    if algorithm == "exact":
        assert packing.optimal


@EVERY_PACKER
@pytest.mark.parametrize("capacity", [1, 7, 8192, LARGEST])
def test_none_one_full_and_equal_items(algorithm: str, capacity: int) -> None:
    none = pack_lengths(np.array([], np.int32), capacity, algorithm)
    assert (none.bin_of.size, none.num_bins, none.lower_bound, gap(none)) == (0, 0, 0, 0)
    one = pack_lengths(np.array([1]), capacity, algorithm)
    assert one.bin_of.tolist() == [0]
    assert one.optimal
    full = pack_lengths(np.full(50, capacity, np.int32), capacity, algorithm)
    assert sorted(full.bin_of.tolist()) == list(range(50))
    assert full.optimal
    for in_bin in (1, 2, 3, 7):
        length = max(capacity // in_bin, 1)
        equal = pack_lengths(np.full(50, length), capacity, algorithm)
        check(equal, np.full(50, length), capacity)
        assert equal.num_bins == -(-50 // (capacity // length))


@EVERY_PACKER
def test_thousands_of_items_of_few_lengths(algorithm: str) -> None:
    """Whole runs of bins are filled at once, and the last ones of a length only in part."""
    items = np.random.default_rng(0).choice(np.array([7, 90, 100, 333, 334, 501, 999]), 5000)
    check(pack_lengths(items, 1000, algorithm), items, 1000)


@settings(max_examples=200, deadline=None)
@given(case=items_and_capacity())
def test_the_histogram_packs_as_best_fit_decreasing_is_defined(case: tuple[np.ndarray, int]) -> None:
    items, capacity = case
    loads = np.bincount(pack_lengths(items, capacity, "bfd").bin_of, weights=items)
    assert sorted(loads.astype(int).tolist()) == naive_best_fit_decreasing(items, capacity)


@settings(max_examples=50, deadline=None)
@given(case=items_and_capacity(max_items=10))
def test_the_first_bin_of_minimum_bin_slack_is_as_full_as_any_with_the_longest_item(
    case: tuple[np.ndarray, int],
) -> None:
    items, capacity = case
    if items.size == 0:
        return
    longest, *others = sorted(items.tolist(), reverse=True)
    sums = {longest}
    for other in others:
        sums |= {total + other for total in sums if total + other <= capacity}
    assert items[pack_lengths(items, capacity, "mbs").bin_of == 0].sum(dtype=np.int64) == max(sums)


@settings(max_examples=20, deadline=None)
@given(case=items_and_capacity(max_items=24))
def test_auto_and_exact_have_no_more_bins_than_the_heuristics_and_no_lower_bound(case: tuple[np.ndarray, int]) -> None:
    items, capacity = case
    heuristics = [pack_lengths(items, capacity, algorithm) for algorithm in ("bfd", "mbs")]
    for algorithm in ("auto", "exact"):
        packing = pack_lengths(items, capacity, algorithm)
        assert packing.num_bins <= min(heuristic.num_bins for heuristic in heuristics)
        if not packing.optimal:
            assert packing.lower_bound >= max(heuristic.lower_bound for heuristic in heuristics)


@settings(max_examples=40, deadline=None)
@given(case=items_and_capacity(max_items=8))
def test_the_constraint_solver_alone_finds_and_proves_the_optimum(case: tuple[np.ndarray, int]) -> None:
    items, capacity = case
    if items.size == 0:
        return
    counted = histogram(items)
    one_each = Packing(np.arange(items.size), items.size, int((items > capacity // 2).sum()) or 1, "none")
    solution = close_gap(counted, capacity, one_each, effort=10)
    check(Packing(counted.in_item_order(solution.bin_of), solution.num_bins, solution.lower_bound, ""), items, capacity)
    assert solution.num_bins == solution.lower_bound == fewest_bins(items.tolist(), capacity)


def test_the_constraint_solver_lets_two_halves_share_a_bin() -> None:
    halves = histogram(np.array([5, 5, 5, 5, 3]))
    solution = close_gap(halves, 10, Packing(np.arange(5), 5, 1, "none"), effort=1)
    assert solution.num_bins == solution.lower_bound == 3


def test_the_better_of_two_solutions_keeps_the_higher_bound_and_ties_keep_the_first() -> None:
    first, second = Packing(np.zeros(0, np.int64), 5, 3, "a"), Packing(np.zeros(0, np.int64), 5, 4, "b")
    assert (first.better(second).algorithm, first.better(second).lower_bound) == ("a", 4)
    assert (second.better(first).algorithm, second.better(first).lower_bound) == ("b", 4)


def test_column_generation_packs_three_to_a_bin_where_the_longest_first_do_not_fit() -> None:
    """All in (C/4, C/2]: by falling length two thirds of the bins hold two long or three short items, both waste."""
    items = np.random.default_rng(0).integers(2049, 4097, 20_000)
    bfd, auto = pack_lengths(items, 8192, "bfd"), pack_lengths(items, 8192)
    check(auto, items, 8192)
    assert auto.algorithm == "column-generation"
    assert gap(bfd) > 0.06
    assert gap(auto) < 0.004
    assert auto.lower_bound > -(-items.sum() // 8192) * 1.03


def test_exact_finds_planted_triplets() -> None:
    """Every bin of the optimum is full to the last token, which only looking at true lengths finds."""
    rng = np.random.default_rng(0)
    first = rng.integers(390, 490, 300)
    second = rng.integers(251, np.minimum(1000 - first - 251, 500))
    items = rng.permutation(np.concatenate([first, second, 1000 - first - second]))
    packing = pack_lengths(items, 1000, "exact")
    check(packing, items, 1000)
    assert packing.lower_bound == 300
    assert packing.num_bins <= 303 < pack_lengths(items, 1000, "mbs").num_bins


def test_steps_of_many_short_sequences_that_best_fit_decreasing_cannot_prove_are_proved() -> None:
    steps = np.clip(np.exp(np.random.default_rng(0).normal(5.5, 1.074, (500, 256))), 16, 2048).astype(np.int64)
    unproved = [step for step in steps if not PACKERS["bfd"](histogram(step), 2048).optimal]
    assert len(unproved) > 10
    for step in unproved:
        packing = pack_lengths(step, 2048)
        check(packing, step, 2048)
        assert packing.optimal


def test_an_unknown_algorithm_is_refused_naming_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'best'") as raised:
        pack_lengths(np.array([1]), 10, "best")
    assert "auto, bfd, mbs, column-generation, exact" in raised.value.hint


@pytest.mark.parametrize("length", [11, 0, -1])
def test_an_item_out_of_range_is_refused_naming_the_first(length: int) -> None:
    with pytest.raises(UsageError, match=f"item 2 has length {length}, expected 1 to 10"):
        pack_lengths(np.array([1, 10, length, 12, 0]), 10)
