"""Which tokens go into which row: the chunks of a plan, or a whole dataset packed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, offsets_of, sum_runs
from chunkplan.errors import DataError
from chunkplan.exporting.checks import PLAN_HINT, read_chunks
from chunkplan.planfile.analysis import Analysis, TokenReader
from chunkplan.planfile.plan import Plan
from chunkplan.rows import pack


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
        """How many rows there are."""
        return self.rows.size - 1

    @property
    def num_sequences(self) -> int:
        """How many sequences there are; one that occurs in several rows counts each time."""
        return int(np.count_nonzero(self.start == 0))

    @property
    def num_tokens(self) -> int:
        """How many tokens there are."""
        return int((self.stop - self.start).sum(dtype=np.int64))

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
    """How many sequences, and what they have; one that occurs several times counts each time."""

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


def packed_rows(analysis: Analysis, chunk_size: int, packing: str, *, drop_longer: bool) -> ExportRows:
    """All sequences packed into rows of `chunk_size` tokens; longer ones are cut, or left out.

    Raises:
        UsageError: there is no such packing.
    """
    packed = pack(analysis, chunk_size, split="full", packing=packing, drop_longer=drop_longer)
    is_part = (packed.start != 0) | (packed.end != analysis.num_tokens[packed.sequence_id])
    return ExportRows(packed.rows, packed.sequence_id, packed.start, packed.end, is_part)


def split_sequences(rows: ExportRows, analysis: Analysis, tokens: TokenReader) -> SplitSequences:
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
