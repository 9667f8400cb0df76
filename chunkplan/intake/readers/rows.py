"""What all readers share: decoded rows -> records and rejections, columns of lengths, and which rows a sample takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from chunkplan.arrays import BoolArray, Int64Array, IntArray, split_mix
from chunkplan.intake.pieces import LengthColumn
from chunkplan.intake.records import JsonObject, LengthRecord, Record
from chunkplan.intake.rejection import RecordError, Rejected
from chunkplan.intake.schemas import RecordLayout, count_unread, parse
from chunkplan.intake.schemas.messages import MEDIA, SUSPECT
from chunkplan.intake.schemas.unread import named
from chunkplan.planfile.schema import to_numpy

#: A row as a reader decodes it: its keys and values as JSON has them, or what is wrong with it.
Row = JsonObject | RecordError

#: The UTF-8 byte order mark.
BOM = b"\xef\xbb\xbf"


class Parsed(NamedTuple):
    """Rows after parsing: `records` with their `numbers`, and those that were rejected; each in order.

    `unread` counts the keys of the former that were not read.
    """

    numbers: Int64Array
    records: list[Record] | LengthColumn
    rejected: list[Rejected]
    unread: Counter[str]


class Lengths(NamedTuple):
    """The lengths of n rows, `values` [n], and which of them are good as they are, `taken` bool [n].

    `unread` counts the other keys of the rows that are taken.
    """

    values: IntArray
    taken: BoolArray
    unread: Counter[str]


def parse_rows(layout: RecordLayout, rows: Sequence[Row], numbers: Sequence[int]) -> Parsed:
    """Make records of rows, which are of these numbers."""
    kept: list[int] = []
    read: list[JsonObject] = []
    records: list[Record] = []
    rejected: list[Rejected] = []
    for number, row in zip(numbers, rows, strict=True):
        if isinstance(row, RecordError):
            rejected.append(rejection(number, row))
            continue
        try:
            records.append(parse(layout, row))
            kept.append(number)
            read.append(row)
        except RecordError as error:
            rejected.append(rejection(number, error))
    return Parsed(np.array(kept, np.int64), records, rejected, count_unread(layout, read))


def are_lengths(layout: RecordLayout) -> bool:
    """Whether records that are laid out so are columns of lengths."""
    return layout.schema == "length" and layout.columns["length"] not in layout.ignored


def plain_lengths(values: IntArray, present: BoolArray) -> BoolArray:
    """Which of n values, of those `present`, are lengths: whole numbers from 1 that fit int32."""
    return present & (values >= 1) & (values <= np.iinfo(np.int32).max)


def lengths_of(batch: pa.RecordBatch, layout: RecordLayout) -> Lengths | None:
    """The lengths in a batch, but of rows that may be refused for other columns; None where there are no integers."""
    key = layout.columns["length"]
    if key not in batch.schema.names or not pa.types.is_integer(batch.column(key).type):
        return None
    column = batch.column(key)
    present = is_valid(column)
    for name in SUSPECT.intersection(batch.schema.names) - {key}:
        present = present & ~is_valid(batch.column(name))
    values = to_numpy(column).astype(np.int64)
    taken = plain_lengths(values, present)
    others = [name for name in batch.schema.names if name != key and name not in MEDIA]
    unread = {named(name): int((is_valid(batch.column(name)) & taken).sum()) for name in others}
    return Lengths(values, taken, +Counter(unread))


def is_valid(array: pa.Array) -> BoolArray:
    """Which values of an array are not null, bool [n]."""
    valid: BoolArray = to_numpy(array.is_valid()) if array.null_count else np.ones(len(array), np.bool_)
    return valid


def parse_lengths(lengths: Lengths, layout: RecordLayout, rest: Sequence[Row], numbers: Int64Array) -> Parsed:
    """The lengths of rows of these numbers [n]; `rest` are the rows that are not taken, which are parsed one by one."""
    others = parse_rows(layout, rest, np.flatnonzero(~lengths.taken).tolist())
    found = np.where(lengths.taken, lengths.values, 0).astype(np.int32)
    found[others.numbers] = [one.num_tokens for one in others.records if isinstance(one, LengthRecord)]  # type: ignore[union-attr]
    is_kept = lengths.taken.copy()
    is_kept[others.numbers] = True
    rejected = [one._replace(number=int(numbers[one.number])) for one in others.rejected]
    return Parsed(numbers[is_kept], LengthColumn(found[is_kept]), rejected, others.unread + lengths.unread)


def rejection(number: int, error: RecordError) -> Rejected:
    """The entry of a row that was rejected for `error`."""
    return Rejected(number, error.reason, error.message, error.hint)


def sampled(positions: Int64Array, rate: float | None) -> BoolArray:
    """Which positions within a source a sample of `rate` takes, bool [n]; all without a rate.

    Which these are does not depend on how the source is cut, and those of a rate are among those of a higher one.
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
