"""Record batches of Arrow -> rows as JSON would have them, and columns of numbers without a row in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chunkplan.arrays import offsets_of
from chunkplan.intake.readers.columns import COLUMN_ROLES, Lists, PlainRows, plain_lengths
from chunkplan.intake.readers.parsing import Row
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.schemas.keys import may_say
from chunkplan.intake.schemas.messages import MEDIA, SUSPECT
from chunkplan.intake.schemas.tokens import HARMLESS
from chunkplan.intake.schemas.unread import named
from chunkplan.planfile.arrow import to_arrow, to_numpy

_INT32 = np.iinfo(np.int32)

#: Types whose values have a length that is known without looking at them.
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


def rows(batch: pa.RecordBatch) -> list[Row]:
    """Every row as keys and values. What is null is left out: Arrow has every key in every row, records have not."""
    try:
        return [_without_nulls(row) for row in batch.to_pylist()]
    except UnicodeDecodeError as error:
        if len(batch) > 1:
            return [row for index in range(len(batch)) for row in rows(batch.slice(index, 1))]
        message = f"not UTF-8: byte 0x{error.object[error.start]:02x} at byte {error.start} of a text ({error.reason})"
        return [RecordError(message, reason="not-utf8", hint="write the file again, with text as UTF-8")]


def token_rows(batch: pa.RecordBatch) -> list[Row]:
    """As `rows`, of records that are tokens: lists of whole numbers are arrays, int32 [n]."""
    lists = {name: own for name in batch.schema.names if (own := _lists(batch, name)) is not None}
    others = batch.select([name for name in batch.schema.names if name not in lists])
    found: list[Row] = rows(others) if others.num_columns else [{} for _ in range(len(batch))]
    for name, (values, offsets, present) in lists.items():
        for index, row in enumerate(found):
            if present[index] and isinstance(row, dict):
                row[name] = values[offsets[index] : offsets[index + 1]]
    return found


def is_mark(field: pa.Field, layout: RecordLayout) -> bool:
    """Whether a column beside token ids may say what is learnt, by its name or as it has lists, but of texts."""
    if layout.schema != "input_ids" or field.name in HARMLESS:
        return False
    is_lists = any(is_kind(field.type) for is_kind in _LISTS)
    return may_say(field.name) or (is_lists and not any(is_kind(field.type.value_type) for is_kind in _TEXTS))


def mark_suspects(batch: pa.RecordBatch, keys: Collection[str]) -> pa.RecordBatch:
    """`batch` with true or false in place of what only has to be there for a record to be refused, but for `keys`.

    Null stays null, and what is empty is false: images are not decoded only to see that there are some.
    """
    columns = [
        _mark(column) if name in SUSPECT and name not in keys else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names) if columns else batch


def plain_batch(batch: pa.RecordBatch, layout: RecordLayout) -> PlainRows | None:
    """The columns of those rows of a batch that are plain; None where the types are not those of numbers.

    For schemas of `COLUMN_ROLES`. Rows that may be refused for their other columns are not plain.
    """
    plain = _plain(batch, layout)
    if plain is None:
        return None
    others = [name for name in batch.schema.names if name not in layout.columns.values() and name not in MEDIA]
    unread = {named(name): int((_valid(batch.column(name)) & plain.taken).sum()) for name in others}
    return plain._replace(unread=+Counter(unread))


def _plain(batch: pa.RecordBatch, layout: RecordLayout) -> PlainRows | None:
    usable = np.ones(len(batch), np.bool_)
    for key in SUSPECT.intersection(batch.schema.names).difference(layout.columns.values()):
        usable &= ~_valid(batch.column(key))
    if layout.schema == "length":
        column = _column(batch, layout.columns["length"])
        if column is None or not pa.types.is_integer(column.type):
            return None
        return plain_lengths(to_numpy(column).astype(np.int64), _valid(column) & usable)
    lists = [_lists(batch, layout.columns.get(role)) for role in COLUMN_ROLES["input_ids"]]
    input_ids, labels, attention_mask = lists
    if input_ids is None or labels is None or attention_mask is None:
        return None
    from chunkplan.intake.readers.token_columns import plain_tokens  # loads numba

    read = {layout.columns[role] for role in COLUMN_ROLES["input_ids"]}
    for name in batch.schema.names:
        if name not in read and is_mark(batch.schema.field(name), layout):
            usable &= ~_valid(batch.column(name))
    input_ids = input_ids._replace(present=input_ids.present & usable)
    return plain_tokens(input_ids, labels, attention_mask, layout)


def _mark(column: pa.Array) -> pa.Array:
    """Which values say something, bool [n]: false for empty lists, texts and objects, null for null."""
    kind = column.type
    if pa.types.is_struct(kind):
        parts = [to_numpy(part.is_valid()) for part in column.flatten()]
        says = to_arrow(np.any([np.zeros(len(column), np.bool_), *parts], axis=0))
    elif any(is_kind(kind) for is_kind in _LISTS):
        says = pc.greater(pc.list_value_length(column), 0)
    elif any(is_kind(kind) for is_kind in _TEXTS):
        says = pc.greater(pc.binary_length(column), 0)
    elif pa.types.is_dictionary(kind):
        return _mark(column.dictionary_decode())
    else:
        return pa.array([None if value is None else bool(value) for value in column.to_pylist()], pa.bool_())
    return pc.if_else(column.is_valid(), says, None)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        first = next((inner for inner in value if inner is not None), None)  # the others are of its type
        return [_without_nulls(inner) for inner in value] if isinstance(first, (dict, list, bytes)) else value
    return value.decode() if isinstance(value, bytes) else value


def _column(batch: pa.RecordBatch, key: str | None) -> pa.Array | None:
    return batch.column(key) if key in batch.schema.names else None


def _valid(array: pa.Array) -> Any:
    return to_numpy(array.is_valid()) if array.null_count else np.ones(len(array), np.bool_)


def _lists(batch: pa.RecordBatch, key: str | None) -> Lists | None:
    """A column of lists of whole numbers that fit int32; no lists at all where there is no such column."""
    column = _column(batch, key)
    if column is None:
        empty = np.zeros(0, np.int32)
        return Lists(empty, np.zeros(len(batch) + 1, np.int64), np.zeros(len(batch), np.bool_))
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    if not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
        return None
    values = column.flatten()  # leaves out what may be behind a null
    if values.null_count:
        return None
    present = _valid(column)
    lengths = np.where(present, np.diff(to_numpy(column.offsets)), 0)
    numbers = to_numpy(values)
    if numbers.size and (numbers.min() < _INT32.min or numbers.max() > _INT32.max):
        return None
    offsets = offsets_of(lengths)
    return Lists(numbers.astype(np.int32), offsets, present)
