"""Bad input of the packer for NeMo-RL: ValueError, as its own packers raise."""

from __future__ import annotations

from typing import Any

import pytest
from nemo_rl.data.packing import get_packer

from chunkplan.adapters.nemo_rl import ChunkplanPacker


@pytest.mark.parametrize(
    ("lengths", "bins", "message"),
    [
        ([5, 0], {}, r"lengths\[1\] is 0, expected 1 .*; leave out sequences"),
        ([5, -2], {}, r"lengths\[1\] is -2, expected 1"),
        ([5.5, 2], {}, "no list of whole numbers; give the tokens"),
        ([5, 70], {}, "70"),
        ([5, 6], {"min_bin_count": 3}, "Cannot create 3 bins with only 2 sequences; use more"),
        ([5, 6, 7], {"bin_count_multiple": 4}, "Cannot create 4 bins with only 3 sequences; use more"),
    ],
)
def test_bad_input_is_a_value_error(lengths: list[int], bins: dict[str, Any], message: str) -> None:
    packer = get_packer("modified_first_fit_decreasing", 64, **bins)
    assert isinstance(packer, ChunkplanPacker)
    with pytest.raises(ValueError, match=message):
        packer.pack(lengths)


def test_nothing_is_packed_into_no_bins() -> None:
    assert get_packer("modified_first_fit_decreasing", 64).pack([]) == []
