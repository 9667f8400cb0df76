"""A mix gives every source its exact share of every epoch."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkplan.errors import UsageError
from chunkplan.planning.selection import check_selection, describe_mix, expected_copies, resolve_mix
from tests.support.selections import config, held_out, mix, numbered, shares

WEIGHTS = [0, 0.1, 0.333, 0.5, 1, 1.0, 1.5, 2, 2.75, 3, 1e-05]


@settings(max_examples=40, deadline=None)
@given(
    num_texts=st.integers(1, 25),
    weight=st.one_of(st.sampled_from(WEIGHTS), st.floats(0, 4)),
    holdout=st.one_of(st.none(), shares),
    seed=st.integers(0, 2**31 - 1),
    first=st.sampled_from([0, 0, 5, 2**30]),
)
def test_every_epoch_has_the_exact_share_and_epochs_are_even(make, num_texts, weight, holdout, seed, first):
    analysis = make(a=numbered(num_texts), b=numbered(4, 100))
    mixed = mix(weight, seed, holdout=holdout)
    out = np.zeros(num_texts + 4, bool) if holdout is None else held_out(analysis, holdout)
    mine = np.flatnonzero(~out[:num_texts])
    doubled = 2 * Fraction(str(weight)) * len(mine)
    expected = (int(doubled) + 1) // 2  # half rounded up
    total = np.zeros(num_texts + 4, np.int64)
    for epoch in range(first, first + 7):
        copies = expected_copies(analysis, mixed, epoch)
        assert copies[:num_texts].sum() == expected
        assert not copies[out].any()
        assert (copies[num_texts:] == ~out[num_texts:]).all()  # not named: once
        if mine.size:
            assert np.ptp(copies[mine]) <= 1
        total += copies
        if mine.size and first == 0:
            assert np.ptp(total[mine]) <= 1


def test_half_of_a_source_is_followed_by_the_other_half(make):
    analysis = make(a=numbered(10))
    first, second, third = (expected_copies(analysis, mix(0.5), epoch) for epoch in range(3))
    assert (first + second).tolist() == [1] * 10
    assert np.array_equal(first, third)
    once_and_a_half = [expected_copies(analysis, mix(1.5), epoch) for epoch in range(2)]
    assert set(once_and_a_half[0].tolist()) == {1, 2}
    assert sum(once_and_a_half).tolist() == [3] * 10


@pytest.mark.parametrize(
    ("weight", "num_texts", "expected"),
    [
        (0.1, 10, 1),
        (0.1, 15, 2),
        (0.1, 14, 1),
        (0.333, 3, 1),
        (0.333, 1000, 333),
        (0, 9, 0),
        (3, 9, 27),
        (0.29, 50, 15),
    ],
)
def test_weights_count_as_they_are_written(make, weight, num_texts, expected):
    """Half is rounded up: 1.5 of 15 is 2; 0.29 * 50 in binary is below 14.5."""
    assert expected_copies(make(a=numbered(num_texts)), mix(weight), 4).sum() == expected


def test_what_is_drawn_depends_on_the_seed_and_the_source_and_on_nothing_else(make):
    half = mix(0.5, 3)
    drawn = expected_copies(make(a=numbered(40)), half, 1)
    others = make(a=numbered(40), b=numbered(7, 50), c=numbered(2, 90))
    with_others = expected_copies(others, replace(half, mix={**half.mix, "data/b.jsonl": 0.3}), 1)
    assert np.array_equal(with_others[:40], drawn)
    assert not np.array_equal(expected_copies(make(a=numbered(40)), mix(0.5, 4), 1), drawn)
    second = expected_copies(make(b=[[1]], a=numbered(40)), half, 1)[1:]
    assert second.sum() == drawn.sum()
    assert not np.array_equal(second, drawn)


def test_the_shuffle_is_the_same_on_every_machine_and_with_every_numpy(make):
    drawn = [np.flatnonzero(expected_copies(make(a=numbered(12)), mix(0.25, 5), epoch)).tolist() for epoch in range(4)]
    assert drawn == [[1, 7, 10], [3, 6, 8], [0, 2, 9], [4, 5, 11]]


def test_evaluation_ignores_the_mix(make):
    analysis = make(a=numbered(40))
    for epoch in range(2):
        copies = expected_copies(analysis, mix(0, holdout=10, part="eval"), epoch)
        assert np.array_equal(copies, held_out(analysis, 10))
    check_selection(analysis, mix(0, holdout=10, part="eval"))


def test_sources_are_named_by_path_or_by_a_file_name_that_is_theirs_alone(make):
    analysis = make(a=numbered(2), b=numbered(2), **{"deep/b": numbered(2)})
    assert resolve_mix(analysis, {"a.jsonl": 2.0, "data/b.jsonl": 0.5}) == {"data/a.jsonl": 2.0, "data/b.jsonl": 0.5}
    assert resolve_mix(analysis, {}) == {}
    with pytest.raises(UsageError, match=r"b\.jsonl names 2 sources .*: data/b\.jsonl, data/deep/b\.jsonl") as raised:
        resolve_mix(analysis, {"b.jsonl": 1})
    assert "whole path" in raised.value.hint
    assert resolve_mix(analysis, {"deep/b.jsonl": 1}) == {"data/deep/b.jsonl": 1}
    assert resolve_mix(analysis, {"deep": 1}) == resolve_mix(analysis, {"data/deep/": 1}) == {"data/deep/b.jsonl": 1}
    assert resolve_mix(analysis, {"b*": 3}) == {"data/b.jsonl": 3, "data/deep/b.jsonl": 3}
    assert len(resolve_mix(analysis, {"data": 3})) == 3
    with pytest.raises(UsageError, match=r"data/deep/b\.jsonl has two weights"):
        resolve_mix(analysis, {"deep": 1, "*.jsonl": 2})
    with pytest.raises(UsageError, match=r"data/a\.jsonl has two weights"):
        resolve_mix(analysis, {"data/a.jsonl": 1, "a.jsonl": 2})


def test_a_file_given_twice_is_one_name(make):
    analysis = make(a=numbered(2), b=numbered(2))
    analysis.manifest["sources"][1]["path"] = "data/a.jsonl"
    assert resolve_mix(analysis, {"a.jsonl": 3}) == {"data/a.jsonl": 3}
    assert expected_copies(analysis, mix(3), 0).tolist() == [3, 3, 3, 3]


def test_a_source_that_is_not_there_is_named_with_those_that_are(make, make_lengths):
    few, many = make(a=[[1]], b=[[2]]), make(**{f"s{index}": [[index]] for index in range(11)})
    for refuse in (
        lambda analysis: resolve_mix(analysis, {"c": 1}),
        lambda a: check_selection(a, config(mix={"c": 1})),
    ):
        with pytest.raises(UsageError, match="no source c") as raised:
            refuse(few)
        assert raised.value.hint == "its sources are data/a.jsonl, data/b.jsonl"
        with pytest.raises(UsageError) as raised:
            refuse(many)
        assert raised.value.hint.endswith("data/s7.jsonl and 3 more")
        with pytest.raises(UsageError, match="lengths without sources") as raised:
            refuse(make_lengths(3))
        assert "analyze the data" in raised.value.hint


@pytest.mark.parametrize(
    "weight", [-0.5, -1, float("nan"), float("inf"), 10**400, 1_000_001, True, "2", "101%", "-1%", "%", None]
)
def test_weights_that_cannot_be_are_refused(make, weight):
    with pytest.raises(UsageError, match=r"the weight of data/a\.jsonl is") as raised:
        check_selection(make(a=[[1]]), mix(weight))
    assert raised.value.hint


@settings(max_examples=40, deadline=None)
@given(
    nums=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    cuts=st.tuples(st.integers(0, 100), st.integers(0, 100)),
    holdout=st.sampled_from([None, 1]),
)
def test_shares_are_of_the_sequences_of_an_epoch_as_large_as_the_data_taken(make, nums, cuts, holdout):
    analysis = make(
        **{name: numbered(num, 100 * place) for place, (name, num) in enumerate(zip("abc", nums, strict=True))}
    )
    percents = (min(cuts), max(cuts) - min(cuts), 100 - max(cuts))
    out = held_out(analysis, holdout) if holdout else np.zeros(sum(nums), bool)
    left = np.bincount(analysis.source[~out], minlength=3)
    said = dict(zip(("a.jsonl", "b.jsonl", "c.jsonl"), (f"{percent}%" for percent in percents), strict=True))
    if any(percent and not number for percent, number in zip(percents, left, strict=True)):
        with pytest.raises(UsageError, match="has no sequence to train on"):
            resolve_mix(analysis, said, holdout)
        return
    mixed = config(mix=resolve_mix(analysis, said, holdout), holdout=holdout)
    in_all = sum(number for percent, number in zip(percents, left, strict=True) if percent)
    copies = expected_copies(analysis, mixed, 0)
    for source, percent in enumerate(percents):
        taken = copies[analysis.source == source].sum()
        assert abs(taken - percent * in_all / 100) <= 0.5 + 1e-6
    described = {share.path: share for share in describe_mix(analysis, mixed)}
    assert sum(share.num_occurrences for share in described.values()) == copies.sum()
    assert sum(share.num_skipped for share in described.values()) == ((copies == 0) & ~out).sum()
    assert sum(share.num_repeated for share in described.values()) == (copies > 1).sum()
    assert sum(share.num_tokens for share in described.values()) == 2 * copies.sum()


def test_what_no_share_names_has_the_rest_in_proportion_or_nothing(make):
    analysis = make(a=numbered(10), b=numbered(30, 50), c=numbered(60, 100))

    def taken(mix):
        copies = expected_copies(analysis, config(mix=resolve_mix(analysis, mix)), 0)
        return [int(copies[analysis.source == source].sum()) for source in range(3)]

    assert taken({"a.jsonl": "55%"}) == [55, 15, 30]
    assert taken({"a.jsonl": "33.3%", "[bc].jsonl": "66.7%"}) == [33, 22, 44]
    assert taken({"a.jsonl": "75%", "b.jsonl": "25%"}) == [30, 10, 0]
    assert taken({"a.jsonl": "0%"}) == [0, 30, 60]
    for bad, message in (
        ({"a.jsonl": "70%", "b.jsonl": "40%"}, "add up to 110%"),
        ({"a.jsonl": "70%", "[bc].jsonl": "20%"}, "add up to 90%"),
        ({"a.jsonl": "70%", "b.jsonl": 2}, "beside numbers"),
    ):
        with pytest.raises(UsageError, match=message):
            resolve_mix(analysis, bad)


def test_the_largest_weights_and_epochs_are_counted_right(make):
    analysis = make(a=numbered(9999))
    check_selection(analysis, mix(1_000_000))
    assert (expected_copies(analysis, mix(1_000_000), 2**31 - 2) == 1_000_000).all()
    copies = expected_copies(analysis, mix(999_999.5), 2**31 - 2)
    assert copies.sum(dtype=np.int64) == 9_998_995_001
    assert np.ptp(copies) == 1


@pytest.mark.parametrize("weight", [0, 0.001])
def test_weights_that_leave_nothing_are_refused(make, weight):
    with pytest.raises(UsageError, match="leave no sequence for training") as raised:
        check_selection(make(a=numbered(9)), mix(weight))
    assert raised.value.hint
    check_selection(make(a=numbered(9), b=[[77]]), mix(weight))
