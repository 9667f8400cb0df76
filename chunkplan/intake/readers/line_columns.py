"""Lines whose records are numbers -> columns."""

from __future__ import annotations

from collections import Counter

import numpy as np

from chunkplan.arrays import Int64Array, UInt8Array, offsets_of
from chunkplan.intake.readers.columns import COLUMN_ROLES, Lists, PlainRows, plain_lengths
from chunkplan.intake.readers.plain_numbers import MAX_OTHERS, find_numbers, read_numbers
from chunkplan.intake.readers.token_columns import plain_tokens
from chunkplan.intake.schemas import Layout
from chunkplan.intake.schemas.refused import SUSPECT
from chunkplan.intake.schemas.unread import named

#: Lines that `schemas.parse` may refuse for other keys.
_OTHERS = sorted(SUSPECT)


def plain_lines(data: bytes, starts: Int64Array, stops: Int64Array, layout: Layout) -> PlainRows:
    """The columns of those of the lines [starts, stops) of `data` that are plain, for a schema of `COLUMN_ROLES`."""
    block = np.frombuffer(data, np.uint8)
    roles = COLUMN_ROLES[layout.schema]
    keys = [key.encode() for key in (*(layout.columns[role] for role in roles), *_OTHERS)]
    first = np.empty((len(starts), len(roles)), np.int64)
    counts = np.empty_like(first)
    key_bytes, key_stops = np.frombuffer(b"".join(keys), np.uint8), np.cumsum([len(key) for key in keys])
    others = np.empty(len(starts), np.int64)
    other_first, other_size = np.empty(MAX_OTHERS, np.int64), np.empty(MAX_OTHERS, np.int64)
    are_lists = layout.schema != "length"
    num_others = find_numbers(
        block, starts, stops, key_bytes, key_stops, are_lists, first, counts, other_first, other_size, others
    )
    columns = [_numbers(block, first[:, role].copy(), counts[:, role].copy()) for role in range(len(roles))]
    if layout.schema == "length":
        (lengths,) = columns
        values = np.zeros(len(starts), np.int32)
        values[lengths.present] = lengths.values
        plain = plain_lengths(values, lengths.present)
    else:
        plain = plain_tokens(*columns)
    unread: Counter[str] = Counter()
    for index, (begin, size) in enumerate(zip(other_first[:num_others].tolist(), other_size.tolist(), strict=False)):
        unread[named(data[begin : begin + size].decode())] += int((others[plain.taken] >> index & 1).sum())
    return plain._replace(unread=+unread)


def _numbers(block: UInt8Array, first: Int64Array, counts: Int64Array) -> Lists:
    offsets = offsets_of(counts)
    values = np.empty(offsets[-1], np.int32)
    read_numbers(block, first, counts, values)
    return Lists(values, offsets, first >= 0)
