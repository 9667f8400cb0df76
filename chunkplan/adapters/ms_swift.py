"""Drop-in packing for `swift.dataset.packing` of ms-swift 4, put in place by `install()` in a file of its plugins."""

from __future__ import annotations

from typing import Any

import numpy as np

from chunkplan.packing import pack_lengths


def install() -> None:
    """Put the functions of this module in place of ms-swift's: call it in a file for `--external_plugins`."""
    from swift.dataset import packing

    packing.calculate_matched_group = calculate_matched_group
    packing.PackingDataset.create_packed_idx = staticmethod(create_packed_idx)


def calculate_matched_group(
    sequences: list[Any], packing_length: int, is_finished: bool = True, strategy: str = "binpack"
) -> tuple[list[list[Any]], list[Any]]:
    """Few rows that hold `sequences`, pairs of anything and a length, the fullest first; the last one waits for more.

    Raises:
        UsageError: a sequence has no tokens, or more than `packing_length`.
    """
    packing = pack_lengths(np.array([length for _, length in sequences], np.int64), packing_length)
    rows: list[list[Any]] = [[] for _ in range(packing.num_bins)]
    for sequence, row in zip(sequences, packing.bin_of.tolist(), strict=True):
        rows[row].append(sequence)
    rows.sort(key=lambda row: -sum(length for _, length in row))
    return (rows, []) if is_finished or not rows else (rows[:-1], rows[-1])


def create_packed_idx(rank: int, offset: int, lengths: list[Any], queue: Any, packing_length: int, how: str) -> None:
    """Pack a part of a dataset at once, in a process of its own: one that begins anew comes here by this module."""
    counted = [(offset + row, sum(each) if isinstance(each, list) else each) for row, each in enumerate(lengths)]
    queue.put((rank, calculate_matched_group(counted, packing_length)[0], len(lengths)))
    queue.put((rank, [], -1))
