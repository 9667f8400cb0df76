"""Shared by all readers: decoded rows to batches of records and rejections, and the rows that a sample takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from chunkplan.arrays import BoolArray, Int64Array, split_mix
from chunkplan.intake.pieces import Batch, LengthColumn
from chunkplan.intake.records import JsonObject, LengthRecord, Record, RecordError, Rejected
from chunkplan.intake.schemas import RecordLayout, count_unread, parse
from chunkplan.intake.schemas.messages import SUSPECT
from chunkplan.intake.schemas.unread import named
from chunkplan.planfile.schema import to_numpy

#: A row as a reader decodes it: its keys and values as JSON has them, or what is wrong with it.
Row = JsonObject | RecordError

#: The UTF-8 byte order mark.
BOM = b"\xef\xbb\xbf"

_INT32_MAX = np.iinfo(np.int32).max


class RowBlock(NamedTuple):
    """Rows that were decoded together, or their lengths where a reader has them as a column; the rest as in `Batch`.

    `numbers` [n] are those of `rows`. `unread` counts keys that the reader left out, or that are beside the lengths.
    """

    rows: Sequence[Row] | LengthColumn
    numbers: Int64Array
    num_records: int
    num_rows: int
    num_bytes: int
    rejected: Sequence[Rejected] = ()
    unread: Mapping[str, int | None] = {}


def make_batch(layout: RecordLayout, block: RowBlock) -> Batch:
    """Make records of the rows of a block."""
    sizes = block.num_records, block.num_rows, block.num_bytes
    if isinstance(block.rows, LengthColumn):
        return Batch(block.numbers, block.rows, *sizes, list(block.rejected), block.unread)
    kept: list[int] = []
    read: list[JsonObject] = []
    records: list[Record] = []
    rejected = list(block.rejected)
    for number, row in zip(block.numbers.tolist(), block.rows, strict=True):
        if isinstance(row, RecordError):
            rejected.append(row.of_row(number))
            continue
        try:
            records.append(parse(layout, row))
            kept.append(number)
            read.append(row)
        except RecordError as error:
            rejected.append(error.of_row(number))
    made: list[Record] | LengthColumn = records
    if layout.schema == "length":
        made = LengthColumn(np.array([one.num_tokens for one in records if isinstance(one, LengthRecord)], np.int32))
    unread = {**block.unread, **count_unread(layout, read)} if read else {}
    return Batch(np.array(kept, np.int64), made, *sizes, sorted(rejected), unread)


def are_lengths(values: Int64Array) -> bool:
    """True if all of `values` are lengths: whole numbers from 1 that fit int32."""
    return not values.size or (int(values.min()) >= 1 and int(values.max()) <= _INT32_MAX)


def is_valid(array: pa.Array) -> BoolArray:
    """Mask of the values of an array that are not null, bool [n]."""
    valid: BoolArray = to_numpy(array.is_valid()) if array.null_count else np.ones(len(array), np.bool_)
    return valid


def lengths_of(batch: pa.RecordBatch, layout: RecordLayout) -> tuple[LengthColumn, dict[str, int]] | None:
    """The lengths in a batch, and its other keys with how many rows have them; None where a row has to be looked at."""
    key = layout.columns["length"]
    column = batch.column(key) if key in batch.schema.names and key not in layout.ignored else None
    others = [name for name in batch.schema.names if name != key]
    if column is None or not pa.types.is_integer(column.type) or column.null_count:
        return None
    if any(is_valid(batch.column(name)).any() for name in SUSPECT.intersection(others)):
        return None
    values = to_numpy(column).astype(np.int64)
    unread = {named(name): int(is_valid(batch.column(name)).sum()) for name in others}
    found = LengthColumn(values.astype(np.int32)), {name: count for name, count in unread.items() if count}
    return found if are_lengths(values) else None


def sampled(positions: Int64Array, rate: float | None) -> BoolArray:
    """Mask of the positions in a source that a sample of `rate` takes, bool [n]; all without a rate.

    The sample does not depend on how the source is cut, and the sample of a rate is part of that of a higher rate.
    """
    if rate is None or rate >= 1:
        return np.ones(len(positions), np.bool_)
    return split_mix(positions) < np.uint64(math.ceil(Fraction(str(rate)) * 2**64))


def too_large(num_bytes: int, limit: int) -> RecordError:
    """The error of a record of `num_bytes` where at most `limit` are read."""
    return RecordError(
        f"{num_bytes:,} bytes, more than the {limit:,} that are read of one record",
        reason="too-large",
        hint="raise --max-record-mb, split the record, or leave it out",
    )


def unreadable(message: str, path: str, *, hint: str) -> RecordError:
    """The error of a file, or the rest of one."""
    return RecordError(message, reason="unreadable", where=path, hint=hint)
