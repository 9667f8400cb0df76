"""Sequences over ranks, and the figure that says how well they are balanced."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import chunkplan
from chunkplan.balance.assign import assign, best_exchange, even_out, least_gain
from chunkplan.cost.durations import attention_pairs_of, work_ns
from tests.support.page_cases import build_plan

DESCENDING = st.lists(st.integers(1, 50), min_size=1, max_size=7).map(lambda work: sorted(work, reverse=True))


def ranks_of(work: np.ndarray, dp: int) -> np.ndarray:
    """The ranks of all sequences, where none has work before."""
    return assign(work, np.ones(work.size, np.bool_), np.zeros(dp, np.int64))


def loads(work: np.ndarray, rank_of: np.ndarray, dp: int) -> np.ndarray:
    return np.bincount(rank_of, weights=work, minlength=dp)


@given(DESCENDING, st.integers(1, 3))
def test_the_heaviest_rank_is_within_four_thirds_of_the_best_possible(work: list[int], dp: int) -> None:
    array = np.array(work, np.int64)
    heaviest = loads(array, ranks_of(array, dp), dp).max()
    best = min(loads(array, np.array(ranks), dp).max() for ranks in product(range(dp), repeat=len(work)))
    assert best <= heaviest <= (4 / 3) * best


def test_costs_count_rather_than_numbers() -> None:
    """One long sequence has a rank to itself."""
    assert ranks_of(np.array([6, 1, 1, 1, 1], np.int64), 2).tolist() == [0, 1, 1, 1, 1]


def test_ties_are_broken_by_position_so_that_a_plan_is_the_same_everywhere() -> None:
    assert ranks_of(np.full(5, 7, np.int64), 2).tolist() == [0, 1, 0, 1, 0]


def test_more_ranks_than_sequences_leave_the_last_ones_without() -> None:
    assert ranks_of(np.array([3, 2], np.int64), 5).tolist() == [0, 1]


def test_ranks_begin_with_what_they_share_and_what_is_not_chosen_stays() -> None:
    work, chosen = np.array([9, 5, 4, 1], np.int64), np.array([False, True, True, True])
    before = np.array([6, 0, 0], np.int64)
    rank_of = assign(work, chosen, before)
    assert rank_of.tolist() == [-1, 1, 2, 2]
    even_out(work, rank_of, before)
    assert rank_of[0] == -1 and before.tolist() == [6, 0, 0]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.integers(1, 6), st.data())
def test_exchanges_never_make_the_heaviest_rank_heavier(values: list[int], dp: int, data: st.DataObject) -> None:
    work = np.array(sorted(values, reverse=True), np.int64)
    rank_of = np.array(data.draw(st.lists(st.integers(0, dp - 1), min_size=work.size, max_size=work.size)), np.int64)
    before = loads(work, rank_of, dp)
    even_out(work, rank_of, np.zeros(dp, np.int64))
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


@pytest.mark.parametrize("pp", [1, 2])
def test_balance_is_that_of_all_steps_also_of_those_that_no_assignment_can_balance(tmp_path: Path, pp: int) -> None:
    """The heaviest ranks over the mean ranks and over work / dp, all of them summed over the steps first."""
    plan = build_plan(tmp_path, pp=pp, k=1)
    lengths = np.load(tmp_path / "lengths.npy")
    work = work_ns(chunkplan.CostModel(), lengths, attention_pairs_of(lengths, 0 * lengths)).sum() / 1e3
    heaviest, mean, excess = 0.0, 0.0, {False: 0.0, True: 0.0}
    for step in plan.iter_steps():
        ranks = [sum(chunk.cost for chunk in chunks) for chunks in step.chunks.values()]
        heaviest, mean = heaviest + max(ranks), mean + sum(ranks) / 2
        excess[step.exceeds_share] += max(ranks) - sum(ranks) / 2
    summary = chunkplan.plan_report(plan).summary
    assert summary.heaviest_over_mean == pytest.approx(heaviest / mean, rel=1e-6)
    assert summary.heaviest_over_work == pytest.approx(heaviest / (work / 2), rel=1e-6)
    assert summary.exceeding_share == pytest.approx(excess[True] / (excess[True] + excess[False]), rel=1e-6)
    assert 0 < summary.num_exceeding_steps < summary.num_steps
    assert 1.1 < summary.heaviest_over_mean < summary.heaviest_over_work < 2 * 2
    assert summary == chunkplan.summarize_plan(plan.steps(), plan.chunks(), plan.manifest)


def test_one_rank_is_balanced_and_has_more_than_its_work_alone(tmp_path: Path) -> None:
    summary = chunkplan.plan_report(build_plan(tmp_path, dp=1)).summary
    assert (summary.heaviest_over_mean, summary.exceeding_share) == (1, 0)
    assert summary.heaviest_over_work is not None and summary.heaviest_over_work > 1.01


def test_work_is_that_of_sequences_where_fetching_weights_takes_longer(tmp_path: Path) -> None:
    """With sharded weights small chunks wait for them, which is nothing that their tokens take."""
    lengths = np.full(8, 100)
    np.save(tmp_path / "lengths.npy", lengths)
    cost = chunkplan.CostModel(sharding="weights")
    config = chunkplan.PlanConfig(chunk_size=128, k=1, dp=2, global_batch=8)
    plan = chunkplan.build(tmp_path / "lengths.npy", tmp_path / "plan", config, cost=cost)
    [step] = plan.iter_steps()
    work_us = work_ns(cost, lengths, attention_pairs_of(lengths, 0 * lengths)).sum() / 1e3
    summary = chunkplan.summarize_plan(plan.steps(), plan.chunks(), plan.manifest)
    assert summary.heaviest_over_work == pytest.approx(step.predicted_us / (work_us / 2), rel=1e-6)
    assert step.predicted_us > (work_us + 8 * cost.forward_equivalents * cost.chunk_overhead_ns / 1e3) / 2 * 1.01
