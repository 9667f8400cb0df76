"""Packs a whole dataset into rows without steps or ranks, for trainers that shuffle packed rows themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chunkplan.arrays import Int64Array, offsets_of
from chunkplan.config.plan import Split
from chunkplan.cost.model import CostModel
from chunkplan.errors import DataError, UsageError
from chunkplan.packing import pack_lengths
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_analysis
from chunkplan.planning.splitting import split_sequences


@dataclass(frozen=True)
class PackedRows:
    """Rows of at most `chunk_size` tokens and a certificate: no packing of the same segments has fewer.

    `rows` int64 [num_rows + 1]: where the segments of each row begin; a segment is tokens start to end of a sequence,
    int64 [num_segments] each. `algorithm` made the packing.
    """

    rows: Int64Array
    sequence_id: Int64Array
    start: Int64Array
    end: Int64Array
    lower_bound: int
    algorithm: str

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return self.rows.size - 1

    @property
    def is_optimal(self) -> bool:
        """Whether no packing has fewer rows."""
        return self.num_rows == self.lower_bound


def pack(
    analysis: Analysis | str | Path,
    chunk_size: int,
    *,
    split: Split = "none",
    packing: str = "auto",
    drop_longer: bool = False,
) -> PackedRows:
    """Pack the sequences of `analysis` (an analysis, its folder, or a lengths file) into rows of `chunk_size` tokens.

    A longer sequence is refused, or with `split` ("full", "even" or "cost") cut into parts that are packed like
    sequences of their own: a trainer that does not carry keys and values over rows then loses what is before a part.
    With `drop_longer` it is left out.

    Raises:
        UsageError: there is no analysis, `chunk_size` is no whole number from 1, or there is no such packing.
        DataError: the analysis is damaged, or a sequence is too long.
    """
    if type(chunk_size) is not int or not 1 <= chunk_size <= np.iinfo(np.int32).max:
        raise UsageError(
            f"chunk size is {chunk_size!r}, expected a whole number from 1 to {np.iinfo(np.int32).max:,}",
            hint="for example 8192",
        )
    if not isinstance(analysis, Analysis):
        analysis = load_analysis(analysis)
    lengths = analysis.num_tokens.astype(np.int64)
    too_long = np.flatnonzero((lengths > chunk_size) & (not drop_longer))
    if drop_longer and lengths.min() > chunk_size:
        raise UsageError(
            f"every sequence has more than {chunk_size:,} tokens",
            where=str(analysis.path),
            hint=f"the shortest has {lengths.min():,}: use rows of that many or more",
        )
    if too_long.size and split == "none":
        raise DataError(
            f"sequence {too_long[0]} has {lengths[too_long[0]]:,} tokens, a row at most {chunk_size:,}",
            where=analysis.place(int(too_long[0])),
            hint=f"use rows of {lengths.max()} tokens or more, or cut such sequences with split",
        )
    num_parts, ends = split_sequences(lengths[too_long], chunk_size, split, CostModel())
    short = np.flatnonzero(lengths <= chunk_size)
    sequence_id = np.concatenate([short, np.repeat(too_long, num_parts)])
    end = np.concatenate([lengths[short], ends])
    follows = np.concatenate([[False], sequence_id[1:] == sequence_id[:-1]])
    start = np.where(follows, np.concatenate([[0], end[:-1]]), 0)
    packed = pack_lengths(end - start, chunk_size, packing)
    by_row = np.argsort(packed.bin_of, kind="stable")
    rows = offsets_of(np.bincount(packed.bin_of, minlength=packed.num_bins))
    return PackedRows(rows, sequence_id[by_row], start[by_row], end[by_row], packed.lower_bound, packed.algorithm)
