"""Lines whose records are numbers -> columns."""

from __future__ import annotations

from collections import Counter

import numpy as np

from chunkplan.arrays import Int64Array, UInt8Array, offsets_of
from chunkplan.intake.readers.columns import COLUMN_ROLES, Lists, PlainRows, plain_lengths
from chunkplan.intake.readers.plain_numbers import MAX_OTHERS, Keys, Strings, find_numbers, read_numbers
from chunkplan.intake.readers.token_columns import plain_tokens
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.schemas.keys import may_say
from chunkplan.intake.schemas.messages import SUSPECT
from chunkplan.intake.schemas.tokens import FOR_EACH, TOKEN_MARKS
from chunkplan.intake.schemas.unread import named

#: Keys besides columns that `schemas.parse` may refuse a line for, whatever they have; or reads, of lines of tokens.
_OTHERS = sorted(SUSPECT)
_OF_TOKENS = [*_OTHERS, *(key for role in FOR_EACH for key in TOKEN_MARKS[role])]


def plain_lines(data: bytes, starts: Int64Array, stops: Int64Array, layout: RecordLayout) -> PlainRows:
    """The columns of those of the lines [starts, stops) of `data` that are plain, for a schema of `COLUMN_ROLES`."""
    block = np.frombuffer(data, np.uint8)
    roles = COLUMN_ROLES[layout.schema]
    wanted = [layout.columns[role] for role in roles]
    refused = _OF_TOKENS if layout.schema == "input_ids" else _OTHERS
    names = [key.encode() for key in (*wanted, *(key for key in refused if key not in wanted))]
    keys = Keys(np.frombuffer(b"".join(names), np.uint8), np.cumsum([len(name) for name in names]))
    first = np.empty((len(starts), len(roles)), np.int64)  # [num_lines, num_roles]
    counts = np.empty_like(first)
    others = Strings(np.empty(MAX_OTHERS, np.int64), np.empty(MAX_OTHERS, np.int64))
    has_other = np.empty(len(starts), np.int64)  # [num_lines], bits
    are_lists = layout.schema != "length"
    num_others = find_numbers(block, starts, stops, keys, are_lists, first, counts, others, has_other)
    names_of_others = [
        data[start : start + size].decode()
        for start, size in zip(others.starts[:num_others].tolist(), others.sizes[:num_others].tolist(), strict=True)
    ]
    columns = [_numbers(block, first[:, role].copy(), counts[:, role].copy()) for role in range(len(roles))]
    if layout.schema == "length":
        (lengths,) = columns
        values = np.zeros(len(starts), np.int32)
        values[lengths.present] = lengths.values
        plain = plain_lengths(values, lengths.present)
    else:
        input_ids, labels, attention_mask = columns
        marks = sum(1 << index for index, key in enumerate(names_of_others) if may_say(key))
        input_ids = input_ids._replace(present=input_ids.present & (has_other & marks == 0))
        plain = plain_tokens(input_ids, labels, attention_mask, layout)
    unread: Counter[str] = Counter()
    for index, key in enumerate(names_of_others):
        unread[named(key)] += int((has_other[plain.taken] >> index & 1).sum())
    return plain._replace(unread=+unread)


def _numbers(block: UInt8Array, first: Int64Array, counts: Int64Array) -> Lists:
    offsets = offsets_of(counts)
    values = np.empty(offsets[-1], np.int32)
    read_numbers(block, first, counts, values)
    return Lists(values, offsets, first >= 0)
