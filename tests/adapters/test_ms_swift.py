"""Packing for ms-swift: every sequence once, in rows within their length, as few as we find."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan.adapters.ms_swift import calculate_matched_group
from chunkplan.errors import UsageError
from chunkplan.packing import pack_lengths

PLUGIN = "from chunkplan.adapters import ms_swift\n\nms_swift.install()\n"

#: Packs as `swift sft --packing true --external_plugins FILE` does, in processes that are forked and begun anew.
PACK = """
import json
import sys
from types import SimpleNamespace
from swift.dataset.packing import PackingDataset
from swift.utils import import_external_file

class Rows(dict):
    def __len__(self):
        return len(self["lengths"])

if __name__ == "__main__":
    import_external_file(sys.argv[1])
    lengths = json.loads(sys.argv[2])
    for context in ("fork", "spawn"):
        template = SimpleNamespace(max_length=64)
        packed = PackingDataset(template, Rows(lengths=lengths), multiprocessing_context=context)
        assert sorted(row for rows in packed.packed_idx for row in rows) == list(range(2500))
        assert max(packed.packed_length) <= 64 and sum(packed.packed_length) == sum(lengths)
        print("rows", len(packed))
"""


@given(st.lists(st.integers(1, 50), max_size=60), st.booleans())
def test_every_sequence_is_in_one_row_and_what_waits_is_the_emptiest(lengths: list[int], is_finished: bool) -> None:
    sequences = [(f"record {number}", length) for number, length in enumerate(lengths)]
    rows, waiting = calculate_matched_group(sequences, 50, is_finished)
    every = [*rows, waiting] if waiting else rows
    assert sorted(sequence for row in every for sequence in row) == sorted(sequences)
    sizes = [sum(length for _, length in row) for row in every]
    assert all(0 < size <= 50 for size in sizes) and sizes == sorted(sizes, reverse=True)
    assert bool(waiting) == (bool(lengths) and not is_finished)
    assert all(one + other > 50 for one, other in pairwise(sizes))  # else a row less would do


def test_a_sequence_above_the_length_of_a_row_is_refused() -> None:
    with pytest.raises(UsageError, match="item 1 has length 51, expected 1 to 50"):
        calculate_matched_group([("a", 3), ("b", 51)], 50)


def test_ms_swift_packs_with_it_in_processes_of_its_own(tmp_path: Path) -> None:
    """Of a whole dataset at once, where its own packs 1,000 sequences at a time."""
    pytest.importorskip("swift.dataset.packing", reason="ms-swift has its own versions of transformers and TRL")
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "pack.py").write_text(PACK)
    lengths = [3 + 37 * number % 61 for number in range(2500)]
    words = [sys.executable, tmp_path / "pack.py", tmp_path / "plugin.py", str(lengths)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    fewest = pack_lengths(np.array(lengths), 64).num_bins
    assert [line for line in done.stdout.splitlines() if line.startswith("rows")] == [f"rows {fewest}"] * 2
