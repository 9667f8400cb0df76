"""What all readers share: decoded rows -> batches of records and rejections, and which rows a sample takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, cast

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array, split_mix
from chunkplan.intake.pieces import Batch, LengthColumn
from chunkplan.intake.records import JsonObject, LengthRecord, Record, RecordError, Rejected
from chunkplan.intake.schemas import RecordLayout, count_unread, parse
from chunkplan.intake.schemas.messages import SUSPECT
from chunkplan.intake.schemas.unread import named

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
    if (lengths := _plain_lengths(block.rows, layout)) is not None:
        return Batch(block.numbers, lengths[0], *sizes, list(block.rejected), lengths[1])
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
    """Whether all of `values` are lengths: whole numbers from 1 that fit int32."""
    return not values.size or (int(values.min()) >= 1 and int(values.max()) <= _INT32_MAX)


def _plain_lengths(rows: Sequence[Row], layout: RecordLayout) -> tuple[LengthColumn, Counter[str]] | None:
    """The lengths in rows none of which is to be refused, and their other keys; None where each has to be looked at."""
    if layout.schema != "length" or layout.ignored or set(map(type, rows)) != {dict}:
        return None
    objects = cast(Sequence[JsonObject], rows)
    key = layout.columns["length"]
    shapes = Counter(map(tuple, objects))
    names = {name for shape in shapes for name in shape} - {key}
    values: list[Any] = [row.get(key) for row in objects]
    if not SUSPECT.isdisjoint(names) or set(map(type, values)) != {int}:
        return None
    if min(values) < 1 or max(values) > _INT32_MAX or (names and any(None in row.values() for row in objects)):
        return None
    unread: Counter[str] = Counter()
    for shape, count in shapes.items():
        unread.update(dict.fromkeys({named(name) for name in shape if name != key}, count))
    return LengthColumn(np.array(values, np.int32)), unread


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
