"""Cutting sequences into parts: whatever the rule, every token and target once, in order, never over ChunkSize."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan.config.plan import Split
from chunkplan.cost.durations import attention_pairs_of, work_ns
from chunkplan.planning.splitting import count_masked_targets, count_part_targets, split_sequences
from tests.support.plain import plain_cost

SPLITS = [split for split in get_args(Split) if split != "none"]
COST = plain_cost()


def cut(lengths: list[int], chunk_size: int, split: Split) -> list[np.ndarray]:
    """The tokens of each part of each sequence."""
    num_parts, ends = split_sequences(np.array(lengths, np.int64), chunk_size, split, COST)
    assert num_parts.sum() == ends.size
    return [np.diff(own, prepend=0) for own in np.split(ends, np.cumsum(num_parts)[:-1])]


@pytest.mark.parametrize("split", SPLITS)
@given(st.integers(1, 9000), st.lists(st.integers(1, 100_000), min_size=1, max_size=3))
def test_parts_cover_a_sequence_and_none_is_empty_or_over_chunk_size(
    split: Split, chunk_size: int, beyond: list[int]
) -> None:
    lengths = [chunk_size + more for more in beyond]
    for length, parts in zip(lengths, cut(lengths, chunk_size, split), strict=True):
        assert parts.sum() == length
        assert parts.min() >= 1
        assert parts.max() <= chunk_size


@given(st.integers(1, 9000), st.integers(1, 100_000))
def test_full_and_even_make_as_few_parts_as_there_can_be(chunk_size: int, beyond: int) -> None:
    length = chunk_size + beyond
    [full], [even] = cut([length], chunk_size, "full"), cut([length], chunk_size, "even")
    assert len(full) == len(even) == -(-length // chunk_size)
    assert (full[:-1] == chunk_size).all()
    assert even.max() - even.min() <= 1


@pytest.mark.parametrize(("length", "chunk_size"), [(100_000, 8192), (1_000_000, 8192), (300_000, 2048), (9000, 8192)])
def test_parts_of_equal_cost_take_the_same_time(length: int, chunk_size: int) -> None:
    """But for whole tokens; where every full part is the same length the last takes several times the first."""

    def times(parts: np.ndarray) -> np.ndarray:
        return work_ns(COST, parts, attention_pairs_of(parts, np.cumsum(parts) - parts))

    [equal], [full] = cut([length], chunk_size, "cost"), cut([length], chunk_size, "full")
    assert np.ptp(times(equal)) <= 0.01 * times(equal).max()
    assert np.ptp(times(full)) > 2 * np.ptp(times(equal))
    assert times(equal).max() <= 1.01 * times(np.array([chunk_size]))[0]


def test_parts_of_equal_cost_all_have_a_token() -> None:
    """At the end of ten million tokens a single one takes longer than a first chunk of two: all have one token."""
    [parts] = cut([2_000_000], 2, "cost")
    assert parts.min() == 1
    assert parts.max() <= 2


@given(st.lists(st.booleans(), min_size=2, max_size=60), st.integers(1, 20))
def test_targets_across_chunk_borders_are_counted_once_where_they_are_predicted(mask: list[bool], size: int) -> None:
    target = np.array([False, *mask[1:]])
    start = np.arange(0, target.size, size)
    end = np.minimum(start + size, target.size)
    counts = count_masked_targets(target, start, end)
    assert counts.sum() == target.sum()
    for low, high, count in zip(start, end, counts, strict=True):
        predicted = [position + 1 for position in range(low, high) if position + 1 < target.size]
        assert count == sum(target[position] for position in predicted)
    twice = [np.tile(values, 2) for values in (0 * start, start, end, 0 * start + target.size)]
    everything = np.arange(target.size) > 0
    for mask in (None, lambda sequence_id: everything):
        assert count_part_targets(*twice, mask).tolist() == 2 * count_masked_targets(everything, start, end).tolist()
