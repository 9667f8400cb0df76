"""The order `auto` keeps every invariant, holds no more than state-aware 1F1B, and is never slower than it."""

from __future__ import annotations

from concurrent.futures import CancelledError
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkplan.cost.rates import UNIT, Rates
from chunkplan.errors import UsageError
from chunkplan.planfile.chunks import chunks_without_segments
from chunkplan.schedule import families
from chunkplan.schedule.actions import Actions, empty_actions
from chunkplan.schedule.auto import BASELINE_MEMORY, auto, auto_step, order_bound, write_tails
from chunkplan.schedule.bounds import jobs_of, least_memory, makespan_bound
from chunkplan.schedule.families import schedule_ranks
from chunkplan.schedule.holdings import KV, kv_tokens, stage_holdings
from chunkplan.schedule.list_schedule import WHOLE, Limits, list_schedule
from chunkplan.schedule.orders import least_forwards, limit_forwards, most_forwards, units_by_work
from chunkplan.validation.validate import validate
from tests.support.schedule_checks import Rank, look, make_rank, ranks, template
from tests.support.small_plans import built


def ordered(rank: Rank, pp: int, memory: int = BASELINE_MEMORY) -> Actions:
    actions, end = auto(*rank, pp, memory, 0, False)
    assert end == look(rank, pp, actions)[0]
    return actions


def kv_peak(rank: Rank, pp: int, actions: Actions) -> int:
    kv = kv_tokens(rank.chunks)
    return max(int(stage_holdings(rank.chunks, kv, actions, 0, stage, pp)[..., KV].max()) for stage in range(pp))


def made_in(folder: str, name: str) -> Path:
    (Path(folder) / name).mkdir()
    return Path(folder) / name


def sixteen_of_four() -> Rank:
    """16 sequences of 4 parts of 1024 tokens on 4 stages, K = 4."""
    return make_rank([1024] * 64, np.repeat(np.arange(16), 4).tolist(), [1] * 64, [1] * 4, UNIT)


def uneven_of_four() -> Rank:
    """64 sequences of 4 parts on 4 stages, of which the last takes longer."""
    return make_rank(
        [8] * 256,
        np.repeat(np.arange(64), 4).tolist(),
        [1] * 256,
        [3, 3, 3, 4],
        Rates(token=100.0, pair=0.0, chunk=0.0),
    )


@given(ranks(most_units=6))
@settings(max_examples=40)
def test_an_order_keeps_invariants_and_holds_no_more_and_takes_no_longer_than_1f1b(drawn: tuple[Rank, int]) -> None:
    rank, pp = drawn
    plain = template(rank, pp)
    plain_end, plain_peaks = look(rank, pp, plain)
    found = ordered(rank, pp)
    end, peaks = look(rank, pp, found)
    assert end <= plain_end
    assert max(peaks) <= max(plain_peaks)
    assert kv_peak(rank, pp, found) <= kv_peak(rank, pp, plain) + least_memory(rank.chunks)


@given(ranks(most_units=6), st.integers(0, 20))
@settings(max_examples=30)
def test_an_order_fits_the_memory_that_there_is(drawn: tuple[Rank, int], more: int) -> None:
    rank, pp = drawn
    memory = int(least_memory(rank.chunks)) + more
    plain_end, plain_peaks = look(rank, pp, template(rank, pp))
    end, peaks = look(rank, pp, ordered(rank, pp, memory))
    assert max(peaks) <= memory
    assert end <= plain_end or max(plain_peaks) > memory


def test_a_pipeline_of_short_groups_is_filled_in_the_memory_of_1f1b() -> None:
    """1F1B idles a third of the time."""
    rank = sixteen_of_four()
    plain_end, plain_peaks = look(rank, 4, template(rank, 4))
    end, peaks = look(rank, 4, ordered(rank, 4))
    bound = makespan_bound(*rank, jobs_of(*rank, 4), 7168)
    assert max(peaks) == max(plain_peaks) == 7168
    assert plain_end == 297_984 and end == bound == 205_824


def test_stages_wait_for_what_is_more_urgent_where_the_last_one_is_the_slowest() -> None:
    rank = uneven_of_four()
    bound = makespan_bound(*rank, jobs_of(*rank, 4), 2**62)
    assert look(rank, 4, template(rank, 4))[0] > 1.3 * bound
    assert look(rank, 4, ordered(rank, 4))[0] < 1.08 * bound


@given(ranks(most_units=6), st.integers(0, 20), st.integers(0, 3))
@settings(max_examples=30)
def test_no_list_schedule_is_done_before_the_longest_tail(drawn: tuple[Rank, int], more: int, ahead: int) -> None:
    rank, pp = drawn
    n, jobs = rank.chunks.num_tokens.size, jobs_of(*rank, pp)
    memory = int(least_memory(rank.chunks)) + more
    order = units_by_work(*rank, 0)
    least, most = least_forwards(order), most_forwards(rank.chunks, order, memory)
    forwards = np.array([limit_forwards(least, most, ahead * (pp - stage)) for stage in range(pp)])
    tails, nothing = np.full((pp, 2 * n), -1), np.empty((pp, 0), np.int64)
    longest = write_tails(*rank, jobs, order, 0, forwards, tails)
    assert longest == tails.max() and (tails >= jobs.work + jobs.after).all()
    for looks_ahead in (nothing, tails):
        limits = Limits(forwards, np.ones(pp, np.bool_), np.full(pp, memory), np.full(pp, 2**60), looks_ahead)
        actions = empty_actions(rank.chunks.keeps_activations, pp, pp, False)
        assert list_schedule(*rank, order, limits, WHOLE, actions) == look(rank, pp, actions)[0] >= longest


def test_memory_that_no_order_fits_is_refused_with_what_it_takes() -> None:
    rank = make_rank([3, 4, 4, 5, 2], [-1, 0, 0, 0, -1], [1, 0, 1, 1, 1], [1, 1], UNIT)
    with pytest.raises(UsageError, match="9 tokens at once, max-activation-tokens allows 8") as caught:
        schedule_ranks(*rank, 2, "auto", 8, lambda rank: f"rank {rank}")
    assert "--max-activation-tokens 9" in caught.value.hint and caught.value.where == "rank 0"
    assert schedule_ranks(*rank, 2, "auto", 9, str).peak_retained_tokens.max() <= 9


def test_the_same_order_is_found_again_and_whoever_else_is_scheduled() -> None:
    random = np.random.default_rng(0)
    units = random.integers(30, 100, 24).tolist()
    groups = [-1] * 9 + [0] * 3 + [1] * 12
    keeps = [1] * 12 + [0] * 8 + [1] * 4
    one = make_rank(units, groups, keeps, [2, 3, 3, 2], Rates(token=10.0, pair=0.02, chunk=50.0, link_token=1.0))
    found = schedule_ranks(*one, 4, "auto", None, str)
    twice = make_rank(units * 2, groups + groups, keeps * 2, [2, 3, 3, 2], Rates(10.0, 0.02, 50.0, link_token=1.0))
    chunks = chunks_without_segments([0, 24, 48], units * 2, groups * 2, keeps * 2)
    both = schedule_ranks(chunks, twice.times, 4, "auto", None, str)
    for array, other in zip(found.actions[:3], both.actions[:3], strict=True):
        assert np.array_equal(np.tile(array, 2), other)
    assert found.stage_end.max() < look(one, 4, template(one, 4))[0]


def test_whoever_cancels_waits_for_one_rank_at_most() -> None:
    rank, asked = sixteen_of_four(), []

    def is_cancelled() -> bool:
        asked.append(True)
        return len(asked) == 3

    many = chunks_without_segments(
        np.arange(0, 64 + 1, 4), rank.chunks.num_tokens, rank.chunks.group_id, rank.chunks.keeps_activations
    )
    with pytest.raises(CancelledError):
        schedule_ranks(many, rank.times, 4, "auto", None, str, 1, is_cancelled)
    assert len(asked) == 3


@given(
    st.lists(st.integers(1, 12_000), min_size=2, max_size=12),
    st.sampled_from([(2, 2), (4, 2), (4, 3), (6, 2), (8, 4)]),
    st.sampled_from(["auto", "zero-bubble"]),
)
@settings(max_examples=25)
def test_ranks_that_share_sequences_are_ordered_together_and_nobody_waits_for_ever(
    lengths: list[int], ranks: tuple[int, int], schedule: str
) -> None:
    dp, pp = ranks
    with TemporaryDirectory() as folder:
        config = {"chunk_size": 1000, "k": 2, "dp": dp, "pp": pp, "global_batch": 12, "epochs": 1, "cp": "auto"}
        plain, found = (built(made_in(folder, name), lengths, schedule=name, **config) for name in ("1f1b", schedule))
        assert not validate(found.path).violations
        steps = [plan.steps() for plan in (plain, found)]
        for of_plain, of_found in zip(*(table.to_pylist() for table in steps), strict=True):
            assert of_found["predicted_us"] <= 1.001 * of_plain["predicted_us"]
            assert of_found["peak_retained_tokens"] <= of_plain["peak_retained_tokens"]


@given(ranks(most_units=4), st.sampled_from(["auto", "zero-bubble"]))
@settings(max_examples=20)
def test_what_was_asked_before_is_answered_without_a_search_and_anything_else_is_searched(
    drawn: tuple[Rank, int], schedule: str
) -> None:
    rank, pp = drawn
    slower = rank.times._replace(durations=2 * rank.times.durations)
    families._cache.clear()
    before = [schedule_ranks(rank.chunks, times, pp, schedule, None, str) for times in (rank.times, slower)]
    assert len(families._cache) == len({times.durations.tobytes() for times in (rank.times, slower)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chunkplan.schedule.auto.auto_step", None)
        again = [schedule_ranks(rank.chunks, times, pp, schedule, None, str) for times in (rank.times, slower)]
    for one, other in zip(before, again, strict=True):
        assert all(np.array_equal(mine, its) for mine, its in zip(one.actions, other.actions, strict=True))
        assert np.array_equal(one.ends, other.ends)


def test_no_more_answers_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_CACHE_STEPS", 3)
    families._cache.clear()
    for length in range(1, 9):
        rank = make_rank([length], [-1], [1], [1, 1], UNIT)
        schedule_ranks(rank.chunks, rank.times, 2, "auto", None, str)
        assert 1 <= len(families._cache) <= 3


def test_an_answer_of_many_chunks_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of a few thousand such ranks would hold them all."""
    monkeypatch.setattr(families, "_CACHE_STEP_SIZE", 6)
    families._cache.clear()
    for num_chunks, is_kept in ((4, False), (3, True)):
        rank = make_rank([5] * num_chunks, [-1] * num_chunks, [1] * num_chunks, [1, 1], UNIT)
        schedule_ranks(rank.chunks, rank.times, 2, "auto", None, str)
        assert bool(families._cache) == is_kept


def step_of(*units: list[int]) -> Rank:
    """A step of ranks whose chunks are of so many tokens each, on 4 stages: none of a split sequence."""
    lengths = [length for of_rank in units for length in of_rank]
    rank = make_rank(lengths, [-1] * len(lengths), [1] * len(lengths), [1] * 4, UNIT)
    chunks = chunks_without_segments(np.cumsum([0, *map(len, units)]), lengths)
    return rank._replace(chunks=chunks)


def rank_actions(actions: Actions, rank: int, pp: int) -> list[list[int]]:
    own = slice(actions.stages[rank * pp], actions.stages[(rank + 1) * pp])
    return [actions.ops[own].tolist(), actions.chunk_ids[own].tolist()]


@given(ranks(most_units=6))
@settings(max_examples=40)
def test_a_step_whose_1f1b_is_near_its_bound_is_not_searched_and_any_other_is(drawn: tuple[Rank, int]) -> None:
    rank, pp = drawn
    bound = order_bound(*rank, pp, False)
    plain = template(rank, pp)
    plain_end = look(rank, pp, plain)[0]
    found = auto_step(*rank, pp, BASELINE_MEMORY, False)
    if plain_end <= 1.02 * bound:
        assert rank_actions(found, 0, pp) == rank_actions(plain, 0, pp)
    else:
        assert rank_actions(found, 0, pp) == rank_actions(ordered(rank, pp), 0, pp)


def test_ranks_that_are_done_before_the_slowest_keep_their_order_and_those_alike_have_one() -> None:
    slow, other, light = [30, 70, 20, 90, 10, 60], [30, 70, 20, 90, 10, 61], [50, 10]
    rank = step_of(light, slow, slow, other, light)
    ends = [look(step_of(units), 4, ordered(step_of(units), 4))[0] for units in (slow, light)]
    plain_ends = [look(step_of(units), 4, template(step_of(units), 4))[0] for units in (slow, light)]
    assert ends[0] < plain_ends[0] and plain_ends[1] < ends[0]
    found = auto_step(*rank, 4, BASELINE_MEMORY, False)
    assert rank_actions(found, 0, 4) == rank_actions(found, 4, 4) == rank_actions(template(step_of(light), 4), 0, 4)
    assert rank_actions(found, 1, 4) == rank_actions(found, 2, 4)
    assert rank_actions(found, 1, 4) != rank_actions(template(step_of(slow), 4), 0, 4)


def test_the_same_step_of_other_sequences_is_searched_once_whatever_else_is_planned() -> None:
    """What is kept is found by what an order depends on, not by what is in the chunks, or in those of other steps."""
    one = step_of([30, 70, 20, 90, 10, 60])
    filled = [
        one.chunks._replace(sequence_id=np.arange(first, first + size), segments=np.full(7, size))
        for first, size in ((0, 3), (7, 5))
    ]
    families._cache.clear()
    for chunks in filled:
        schedule_ranks(chunks, one.times, 4, "auto", None, str)
    assert len(families._cache) == 1
