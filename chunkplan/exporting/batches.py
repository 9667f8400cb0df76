"""Rows with their tokens, as many at a time as fit into little memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, offsets_of
from chunkplan.exporting.rows import ExportRows
from chunkplan.planfile.analysis import TokenReader
from chunkplan.planfile.schema import to_arrow

#: Only a single row can make a batch larger. Readers of Parquet that shuffle decode a whole one for every row.
_BATCH_TOKENS = 1 << 20


@dataclass(frozen=True)
class RowBatch:
    """Some rows, one after another: token ids int32 and targets bool [num_tokens].

    `target[i]`: token i counts in the loss and is predicted from token i - 1; false where a segment begins. Offsets
    int32, one more than there are: `row_segments` and `row_tokens` where the segments and the tokens of each row
    begin, `segment_tokens` where the tokens of each segment do. `step` and `dp_rank` int32 [num_rows] or None.
    """

    input_ids: Int32Array
    target: BoolArray
    row_segments: Int32Array
    row_tokens: Int32Array
    segment_tokens: Int32Array
    step: Int32Array | None
    dp_rank: Int32Array | None

    @property
    def predicts(self) -> BoolArray:
        """True for tokens that a target is predicted from, bool [num_tokens]: a segment's last one is none of them."""
        return np.append(self.target[1:], False)

    def to_arrow(self, per_token: dict[str, npt.NDArray[Any]], per_segment: dict[str, Int32Array]) -> pa.RecordBatch:
        """A list of these values for each row, then its step and dp_rank where there are any."""
        columns = {name: _lists(self.row_tokens, values) for name, values in per_token.items()}
        columns |= {name: _lists(self.row_segments, values) for name, values in per_segment.items()}
        places = {"step": self.step, "dp_rank": self.dp_rank}
        columns |= {name: to_arrow(values) for name, values in places.items() if values is not None}
        return pa.record_batch(columns)


def read_batches(rows: ExportRows, tokens: TokenReader, batch_tokens: int = _BATCH_TOKENS) -> Iterator[RowBatch]:
    """All of `rows` in order, at most `batch_tokens` at a time or else a single row.

    Raises:
        DataError: the tokens are damaged.
    """
    segment_starts = offsets_of(rows.stop - rows.start)  # [num_segments + 1], in tokens of all rows
    row_starts = segment_starts[rows.rows]  # [num_rows + 1]
    start = 0
    while start < rows.num_rows:
        fitting = int(np.searchsorted(row_starts, row_starts[start] + batch_tokens, side="right")) - 1
        stop = max(fitting, start + 1)
        yield _read(rows, tokens, slice(start, stop), segment_starts)
        start = stop


class LazyRows:
    """Rows by their place, read when they are asked for: the tokens stay memory-mapped, and no copy is held."""

    def __init__(self, rows: ExportRows, tokens: TokenReader) -> None:
        self.rows = rows
        self.tokens = tokens
        self._segment_starts = offsets_of(rows.stop - rows.start)

    def __len__(self) -> int:
        return self.rows.num_rows

    def __getitem__(self, place: int) -> RowBatch:
        row = range(len(self))[place]  # from the end if negative, and IndexError, as of a list
        return _read(self.rows, self.tokens, slice(row, row + 1), self._segment_starts)


def _read(rows: ExportRows, tokens: TokenReader, batch: slice, segment_starts: Int64Array) -> RowBatch:
    """The rows of the slice `batch`, with their tokens."""
    row_segments = rows.rows[batch.start : batch.stop + 1]
    segments = slice(row_segments[0], row_segments[-1])
    segment_tokens = segment_starts[segments.start : segments.stop + 1]
    segment_tokens = (segment_tokens - segment_tokens[0]).astype(np.int32)
    input_ids, is_target = tokens.gather(rows.sequence_id[segments], rows.start[segments], rows.stop[segments])
    target = is_target.copy()
    target[segment_tokens[:-1]] = False
    row_segments = (row_segments - row_segments[0]).astype(np.int32)
    return RowBatch(
        input_ids=input_ids,
        target=target,
        row_segments=row_segments,
        row_tokens=segment_tokens[row_segments],
        segment_tokens=segment_tokens,
        step=None if rows.step is None else rows.step[batch],
        dp_rank=None if rows.dp_rank is None else rows.dp_rank[batch],
    )


def _lists(offsets: Int32Array, values: npt.NDArray[Any]) -> pa.ListArray:
    return pa.ListArray.from_arrays(to_arrow(offsets), to_arrow(values))
