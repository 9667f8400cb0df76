"""Searched schedules keep every invariant and the memory bound, and are never slower than state-aware 1F1B."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkplan.cost.rates import UNIT, Rates
from chunkplan.errors import UsageError
from chunkplan.schedule.families import schedule_ranks
from chunkplan.schedule.search import SearchResult, search
from tests.support.schedule_checks import Rank, example, look, make_rank, ranks, template


def least_memory(rank: Rank) -> int:
    """The tokens that one unit after the other takes: the kept chunks of a group together, others alone."""
    kept = [
        int(rank.chunks.num_tokens[(rank.chunks.group_id == group) & rank.chunks.keeps_activations].sum())
        for group in set(rank.chunks.group_id.tolist()) - {-1}
    ]
    return max(kept + rank.chunks.num_tokens.tolist())


def look_at(rank: Rank, pp: int, found: SearchResult) -> list[int]:
    end, peaks = look(rank, pp, found.actions)
    assert found.lower_bound <= found.makespan == end
    return peaks


@given(ranks(most_units=6), st.integers(0, 20))
@settings(max_examples=30)
def test_search_keeps_invariants_and_memory_and_is_not_slower_than_1f1b(drawn: tuple[Rank, int], more: int) -> None:
    rank, pp = drawn
    end, peaks = look(rank, pp, template(rank, pp))
    free = search(*rank, pp, None)
    look_at(rank, pp, free)
    assert free.makespan <= end
    memory = least_memory(rank) + more
    bound = search(*rank, pp, memory)
    assert max(look_at(rank, pp, bound)) <= memory
    assert bound.makespan <= end or max(peaks) > memory
    assert bound.lower_bound >= free.lower_bound or free.makespan >= bound.lower_bound


@pytest.mark.parametrize("memory", [None, 8])
@pytest.mark.parametrize(
    ("name", "end"), [("C = 2 units, K = 2", 42), ("C = 2 units, K = 1", 44), ("C = 1 unit, K = 4", 33), ("uncut", 52)]
)
def test_the_best_orders_of_the_published_example_are_found_and_proved(name: str, end: int, memory: int | None) -> None:
    """1F1B takes 46, 48, 41 and 56, and retains 8 units."""
    rank = example(name)
    found = search(*rank, 4, memory)
    assert max(look_at(rank, 4, found)) <= 8
    assert (found.makespan, found.lower_bound) == (end, end)


def test_less_memory_takes_longer_and_the_least_one_unit_after_the_other() -> None:
    """Four equal micro-batches of 2 units on 4 stages, retained 6, 4 or 2 units at a time."""
    rank = make_rank([2] * 4, [-1] * 4, [1] * 4, [1] * 4, UNIT)
    ends = [search(*rank, 4, memory).makespan for memory in (8, 6, 4, 2)]
    assert ends[0] == 42 and ends[-1] == 4 * 24
    assert ends == sorted(ends)


def test_what_cannot_fit_is_refused_with_what_it_takes() -> None:
    rank = make_rank([3, 4, 4, 5, 2], [-1, 0, 0, 0, -1], [1, 0, 1, 1, 1], [1, 1], UNIT)
    assert max(look_at(rank, 2, search(*rank, 2, 9))) == 9
    with pytest.raises(UsageError, match="9 tokens at once, max-activation-tokens allows 8") as caught:
        schedule_ranks(*rank, 2, "search", 8, str)
    assert "--max-activation-tokens 9" in caught.value.hint


def long_tailed(num_standalone: int, parts: list[int], k: int) -> Rank:
    random = np.random.default_rng(0)
    units = random.integers(30, 100, num_standalone).tolist() + [100] * sum(parts)
    groups = [-1] * num_standalone + [group for group, size in enumerate(parts) for _ in range(size)]
    keeps = [1] * num_standalone + [int(part >= size - k) for size in parts for part in range(size)]
    return make_rank(units, groups, keeps, [4] * 8, Rates(token=10.0, pair=0.02, chunk=50.0, link_token=1.0))


@pytest.mark.parametrize("memory", [None, 800])
def test_of_many_chunks_on_many_stages_an_order_much_faster_than_1f1b_is_found_again_and_again(
    memory: int | None,
) -> None:
    rank = long_tailed(20, [3, 5, 16], k=4)
    found, again = search(*rank, 8, memory), search(*rank, 8, memory)
    assert max(look_at(rank, 8, found)) <= (memory or rank.chunks.num_tokens.sum())
    assert found.makespan < 0.9 * look(rank, 8, template(rank, 8))[0]
    assert memory or found.makespan < 1.1 * found.lower_bound
    for array, other in zip(found.actions, again.actions, strict=True):
        assert np.array_equal(array, other)
