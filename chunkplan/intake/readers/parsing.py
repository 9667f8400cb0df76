"""What all readers share: decoded rows -> records and rejections, and which rows a sample takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array, split_mix
from chunkplan.intake.records import JsonObject, Record
from chunkplan.intake.rejection import RecordError, Rejected
from chunkplan.intake.schemas import RecordLayout, count_unread, parse

#: A row as a reader decodes it: its keys and values as JSON has them, or what is wrong with it.
Row = JsonObject | RecordError


class Parsed(NamedTuple):
    """Rows after parsing: `records` with their `numbers`, and those that were rejected; each in order.

    `unread` counts the keys of the former that were not read.
    """

    numbers: list[int]
    records: list[Record]
    rejected: list[Rejected]
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
    return Parsed(kept, records, rejected, count_unread(layout, read))


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
