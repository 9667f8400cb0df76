"""A whole dataset packed into rows, without steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan import pack
from chunkplan.config.plan import Split
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_lengths


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


def analysis_of(folder: Path, lengths: list[int]) -> Analysis:
    np.save(folder / "lengths.npy", np.array(lengths))
    return load_lengths(folder / "lengths.npy")


@pytest.mark.parametrize("split", ["full", "even", "cost"])
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=30), chunk_size=st.integers(1, 40))
def test_every_token_is_in_one_row_and_no_row_is_too_long(
    folder: Path, split: Split, lengths: list[int], chunk_size: int
) -> None:
    packed = pack(analysis_of(folder, lengths), chunk_size, split=split)
    tokens = packed.end - packed.start
    assert packed.rows[0] == 0
    assert packed.rows[-1] == tokens.size
    per_row = np.add.reduceat(tokens, packed.rows[:-1])
    assert (np.diff(packed.rows) > 0).all()
    assert per_row.max() <= chunk_size
    assert packed.lower_bound <= packed.num_rows
    assert packed.is_optimal == (packed.lower_bound == packed.num_rows)
    covered = sorted(zip(packed.sequence_id.tolist(), packed.start.tolist(), packed.end.tolist(), strict=True))
    expected_start = 0
    for sequence_id, start, end in covered:
        assert start == expected_start
        expected_start = end if end < lengths[sequence_id] else 0
    assert sorted(set(packed.sequence_id.tolist())) == list(range(len(lengths)))
    assert tokens.sum() == sum(lengths)


def test_rows_are_filled_and_the_algorithm_is_named(folder: Path) -> None:
    """Rows of 10: 6 + 4 twice; the algorithm that made it is named."""
    packed = pack(analysis_of(folder, [6, 4, 6, 4]), 10, packing="bfd")
    assert packed.num_rows == packed.lower_bound == 2
    assert packed.algorithm == "bfd"
    first, second = np.split(packed.sequence_id, packed.rows[1:-1])
    assert {tuple(sorted(first.tolist())), tuple(sorted(second.tolist()))} in ({(0, 1), (2, 3)}, {(0, 3), (1, 2)})


def test_what_is_too_long_is_named_unless_it_may_be_cut(folder: Path) -> None:
    analysis = analysis_of(folder, [3, 12, 5])
    with pytest.raises(DataError, match="sequence 1 has 12 tokens") as refused:
        pack(analysis, 10)
    assert str(refused.value.where).endswith("row 1")
    assert pack(analysis, 10, split="full").num_rows == 2


def test_what_is_too_long_may_be_left_out_unless_nothing_is_left(folder: Path) -> None:
    analysis = analysis_of(folder, [3, 12, 5])
    assert sorted(pack(analysis, 10, drop_longer=True).sequence_id.tolist()) == [0, 2]
    with pytest.raises(UsageError, match="every sequence has more than 2 tokens"):
        pack(analysis, 2, drop_longer=True)


@pytest.mark.parametrize("chunk_size", [0, -1, 2.5, True, 2**31])
def test_rows_have_a_whole_number_of_tokens(folder: Path, chunk_size: int) -> None:
    with pytest.raises(UsageError, match="chunk size is"):
        pack(analysis_of(folder, [3]), chunk_size)


def test_an_unknown_algorithm_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="ffd"):
        pack(analysis_of(folder, [3]), 10, packing="ffd")
