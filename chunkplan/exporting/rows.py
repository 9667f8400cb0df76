"""Rows to export: the chunks of a plan, or a whole dataset packed without steps or ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, offsets_of, sum_runs
from chunkplan.config.plan import Split
from chunkplan.cost.model import CostModel
from chunkplan.errors import DataError, UsageError
from chunkplan.exporting.checks import PLAN_HINT, read_chunks
from chunkplan.packing import pack_lengths
from chunkplan.planfile.analysis import Analysis, TokenReader
from chunkplan.planfile.load import load_analysis
from chunkplan.planfile.plan import Plan
from chunkplan.planning.splitting import split_sequences

# Packs a whole dataset into rows without steps or ranks, for trainers that shuffle packed rows themselves.


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
        """Number of rows."""
        return self.rows.size - 1

    @property
    def is_optimal(self) -> bool:
        """True if no packing has fewer rows."""
        return self.num_rows == self.lower_bound


def pack(
    analysis: Analysis | str | Path,
    chunk_size: int,
    *,
    split: Split = "none",
    packing: str = "auto",
    drop_longer: bool = False,
    multiple: int = 1,
) -> PackedRows:
    """Pack the sequences of `analysis` (an analysis, its folder, or a lengths file) into rows of `chunk_size` tokens.

    Example: `chunkplan.pack("lengths.npy", 8192)`

    A longer sequence is refused, or with `split` ("full", "even" or "cost") cut into parts that are packed like
    sequences of their own: a trainer that does not carry keys and values over rows then loses what is before a part.
    With `drop_longer` it is left out. Each takes up its tokens rounded up to a `multiple`, as some trainers pad them.

    Raises:
        UsageError: there is no analysis, `chunk_size` is no whole number from 1, or there is no such packing.
        DataError: the analysis is damaged, or a sequence is too long.
    """
    if type(chunk_size) is not int or not 1 <= chunk_size <= np.iinfo(np.int32).max:
        raise UsageError(
            f"chunk size is {chunk_size!r}, expected a whole number from 1 to {np.iinfo(np.int32).max:,}",
            hint="for example 8192",
        )
    chunk_size -= chunk_size % multiple
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
    packed = pack_lengths(-((start - end) // multiple), chunk_size // multiple, packing)
    by_row = np.argsort(packed.bin_of, kind="stable")
    rows = offsets_of(np.bincount(packed.bin_of, minlength=packed.num_bins))
    return PackedRows(rows, sequence_id[by_row], start[by_row], end[by_row], packed.lower_bound, packed.algorithm)


@dataclass(frozen=True)
class ExportRows:
    """Rows of segments: row i has the segments rows[i] to rows[i + 1].

    `rows` int64 [num_rows + 1]. A segment is tokens [start, stop) of a sequence, int64 [num_segments] each, and a part
    where `is_part`: less than its whole sequence. `step` and `dp_rank` int32 [num_rows] are None without a plan.
    """

    rows: Int64Array
    sequence_id: Int64Array
    start: Int64Array
    stop: Int64Array
    is_part: BoolArray
    step: Int32Array | None = None
    dp_rank: Int32Array | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.rows.size - 1

    @property
    def num_sequences(self) -> int:
        """Number of sequences; one that occurs in several rows counts each time."""
        return int(np.count_nonzero(self.start == 0))

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return int((self.stop - self.start).sum(dtype=np.int64))

    def num_inputs(self, multiple: int = 1) -> Int64Array:
        """Tokens of each segment but its last, which predicts none, up to a `multiple`: int64 [num_segments]."""
        return -((self.start + 1 - self.stop) // multiple) * multiple

    def only(self, kept: BoolArray) -> ExportRows:
        """The segments that are `kept` [num_segments], in the rows that have any."""
        per_row = sum_runs(kept.astype(np.int64), self.rows)
        filled = per_row > 0
        return replace(
            self,
            rows=offsets_of(per_row[filled]),
            sequence_id=self.sequence_id[kept],
            start=self.start[kept],
            stop=self.stop[kept],
            is_part=self.is_part[kept],
            step=None if self.step is None else self.step[filled],
            dp_rank=None if self.dp_rank is None else self.dp_rank[filled],
        )


@dataclass(frozen=True)
class WholeSequences:
    """Counts of whole sequences and their tokens; one that occurs several times counts each time."""

    num_sequences: int
    num_tokens: int
    num_target_tokens: int


@dataclass(frozen=True)
class SplitSequences:
    """Sequences in `num_parts` parts, and what they lose where every part is trained as a sequence of its own.

    `num_tokens_without_prefix` do not see what is before their part; `num_lost_targets` are first in their part, so
    that there is nothing to predict them from.
    """

    whole: WholeSequences
    num_parts: int
    num_tokens_without_prefix: int
    num_lost_targets: int


def plan_rows(plan: Plan, analysis: Analysis) -> ExportRows:
    """The chunks of a plan in order of step, rank and chunk, without those that have no tokens.

    Raises:
        DataError: a file is damaged or was changed, or the analysis does not have the tokens that the plan names.
    """
    columns = read_chunks(plan, analysis)
    within = columns.is_known & (columns.start >= 0) & (columns.start < columns.end)
    wrong = np.flatnonzero(~(within & (columns.end <= columns.sequence_tokens)))
    if wrong.size:
        name, start, stop = (int(values[wrong[0]]) for values in (columns.sequence_id, columns.start, columns.end))
        raise DataError(
            f"tokens {start} to {stop} of sequence {name} are not in the analysis",
            where=str(plan.path),
            hint=PLAN_HINT,
        )
    chunks = ExportRows(
        rows=columns.segments,
        sequence_id=columns.sequence_id,
        start=columns.start.astype(np.int64),
        stop=columns.end.astype(np.int64),
        is_part=columns.is_part,
        step=columns.chunks["step"],
        dp_rank=columns.chunks["dp_rank"],
    )
    return chunks.only(np.ones(columns.sequence_id.size, bool))


def packed_rows(analysis: Analysis, chunk_size: int, packing: str, multiple: int, *, drop_longer: bool) -> ExportRows:
    """All sequences packed into rows of `chunk_size` tokens; longer ones are cut, or left out.

    Raises:
        UsageError: there is no such packing.
    """
    packed = pack(analysis, chunk_size, split="full", packing=packing, drop_longer=drop_longer, multiple=multiple)
    is_part = (packed.start != 0) | (packed.end != analysis.num_tokens[packed.sequence_id])
    return ExportRows(packed.rows, packed.sequence_id, packed.start, packed.end, is_part)


def count_split(rows: ExportRows, analysis: Analysis, tokens: TokenReader) -> SplitSequences:
    """Count the sequences of `rows` that are in parts, and what they lose.

    Raises:
        DataError: the tokens are damaged.
    """
    parts = rows.only(rows.is_part)
    whole = parts.sequence_id[parts.start == 0]
    later = parts.only(parts.start > 0)
    _, is_target = tokens.gather(later.sequence_id, later.start, later.start + 1)
    return SplitSequences(
        whole=WholeSequences(
            num_sequences=whole.size,
            num_tokens=int(analysis.num_tokens[whole].sum(dtype=np.int64)),
            num_target_tokens=int(analysis.num_target_tokens[whole].sum(dtype=np.int64)),
        ),
        num_parts=parts.sequence_id.size,
        num_tokens_without_prefix=later.num_tokens,
        num_lost_targets=int(np.count_nonzero(is_target)),
    )
