"""Tables, Parquet and Arrow: pieces are row groups or record batches; every row is one record or rejected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chunkplan.arrays import BoolArray, offsets_of
from chunkplan.intake import pieces
from chunkplan.intake.files import is_url
from chunkplan.intake.pieces import LengthColumn, Piece
from chunkplan.intake.readers.rows import Row, RowBlock, is_valid, lengths_of, sampled, too_large, unreadable
from chunkplan.intake.readers.streams import fetch
from chunkplan.intake.readers.table_files import TableFile, UnreadableRows, open_table
from chunkplan.intake.records import RecordError
from chunkplan.intake.schemas import SCHEMAS, RecordLayout
from chunkplan.intake.schemas.keys import may_say
from chunkplan.intake.schemas.messages import MEDIA, SUSPECT
from chunkplan.intake.schemas.tokens import HARMLESS, OF_TOKENS
from chunkplan.intake.schemas.unread import is_looked_at, named
from chunkplan.intake.sources import SourceFile
from chunkplan.planfile.schema import to_arrow, to_numpy

_INT32 = np.iinfo(np.int32)

#: Types whose values have a length that is known without looking at them.
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


def cut(file: SourceFile, source: int, folder: Path) -> Iterator[Piece]:
    """The pieces of a table: whole row groups up to about `PIECE_BYTES`, or one larger row group.

    Arrow behind a URL cannot be cut: it is copied into `folder`, as one piece.
    """
    is_copy = file.kind == "arrow" and is_url(file.path)
    path = fetch(file.path, folder / f"source-{source:05}.{file.kind}") if is_copy else file.path
    piece = Piece(source, 0, path, file.kind, 0, 0, origin=0, is_temporary=is_copy)
    num_rows = 0
    damage: RecordError | None = None
    try:
        with open_table(path, file.kind, is_look=True) as table:
            for group in table.row_groups():
                if num_rows and piece.num_bytes + group.num_bytes > pieces.PIECE_BYTES and not is_copy:
                    yield piece
                    index, origin = piece.index + 1, piece.origin + num_rows
                    piece = replace(piece, index=index, start=piece.stop, origin=origin, num_bytes=0, share=0)
                    num_rows = 0
                num_bytes, share = piece.num_bytes + group.num_bytes, piece.share + group.stored
                piece = replace(piece, stop=piece.stop + 1, num_bytes=num_bytes, share=share)
                num_rows += group.num_rows
    except RecordError as error:
        error.where = file.path
        damage = error
    if num_rows:
        yield piece
    if damage is not None:
        raise damage
    if not num_rows and not piece.index:
        raise unreadable("a table without rows", file.path, hint="leave it out, or write it again")


def length_column(file: SourceFile) -> str | None:
    """The name of the only column of a table, if that has whole numbers; raises as `readers.default_columns`."""
    with open_table(file.path, file.kind, is_look=True) as table:
        only = table.schema.field(0) if len(table.schema) == 1 else None
    return str(only.name) if only is not None and pa.types.is_integer(only.type) else None


def rows(
    piece: Piece, layout: RecordLayout | None, max_rows: int, max_record_bytes: int, sample: float | None
) -> Iterator[RowBlock]:
    """Implements `readers.read`; rows that are lost to damage are rejected each. Without a layout all columns are read.

    Of a file that cannot even be opened any more, all is one that is rejected.
    """
    row = total = 0
    keys = layout.columns.values() if layout else ()
    unread: dict[str, int | None] = {}  # of columns that are not read it is not known which rows have a value

    def block(found: pa.RecordBatch | UnreadableRows) -> RowBlock:
        is_chosen = sampled(piece.origin + row + np.arange(found.num_rows), sample)
        decoded: Sequence[Row] | LengthColumn
        if isinstance(found, UnreadableRows):
            decoded, large, others = [found.error] * int(is_chosen.sum()), [], unread
        else:
            large = _too_large_rows(found, is_chosen, max_record_bytes)
            chosen = found if is_chosen.all() else found.take(to_arrow(np.flatnonzero(is_chosen)))
            decoded, beside = _decode(chosen, layout)
            others = {**unread, **beside}
        before, behind = (piece.num_bytes * count // max(total, 1) for count in (row, row + found.num_rows))
        rejected = [error.of_row(row + index) for index, error in large]
        sizes = found.num_rows, found.num_rows, behind - before
        return RowBlock(decoded, row + np.flatnonzero(is_chosen), *sizes, rejected, others)

    try:
        with open_table(piece.path, piece.reader, is_look=layout is None) as table:
            total = 0 if layout is None else _num_rows(table, piece)
            wanted = table.schema.names if layout is None else _wanted(table.schema, layout)
            others = (field for field in table.schema if field.name not in wanted)
            unread = {named(field.name): None for field in others if not pa.types.is_null(field.type)}
            for found in table.batches(piece.start, piece.stop, wanted, max_rows):
                if isinstance(found, pa.RecordBatch):
                    for name in set(MEDIA).intersection(found.schema.names).difference(keys):
                        index = found.schema.get_field_index(name)
                        found = found.set_column(index, name, _mark(found.column(index)))
                yield block(found)
                row += found.num_rows
    except RecordError as error:
        if layout is None:
            raise
        if total:
            yield block(UnreadableRows(total - row, error))
        else:
            yield RowBlock([error], np.array([-1]), 1, 0, piece.num_bytes)


def digest(piece: Piece) -> str:
    """SHA-256 of what is read: of Parquet the raw bytes, of Arrow the data."""
    with open_table(piece.path, piece.reader) as table:
        return table.digest(piece.start, piece.stop)


def num_rows(piece: Piece) -> int:
    """Number of rows of a piece."""
    with open_table(piece.path, piece.reader) as table:
        return _num_rows(table, piece)


def alone(piece: Piece, number: int, folder: Path) -> Piece:
    """The piece of one row, which is written into `folder` with all of its columns."""
    path = folder / "row.arrow"
    before = 0
    with open_table(piece.path, piece.reader) as table:
        for found in table.batches(piece.start, piece.stop, table.schema.names, pieces.BATCH_RECORDS):
            if number < before + found.num_rows:
                break
            before += found.num_rows
        if isinstance(found, UnreadableRows):
            raise found.error
        with pa.ipc.new_file(str(path), found.schema) as file:
            file.write_batch(found.slice(number - before, 1))
    origin = piece.origin + number
    return replace(piece, path=str(path), reader="arrow", start=0, stop=1, origin=origin, is_temporary=True)


def _wanted(schema: pa.Schema, layout: RecordLayout) -> list[str]:
    """The columns that the layout reads, and those that records are refused for, without ignored ones.

    All columns if there are none of the former, for errors to list them.
    """
    names = [name for name in schema.names if name not in layout.ignored]
    keys = SCHEMAS[layout.schema].all_keys(layout.columns)
    if keys.isdisjoint(names):
        return names
    more = (name for name in names if is_looked_at(name, layout.schema) or _is_mark(schema.field(name), layout))
    wanted = keys | SUSPECT.union(more)
    return [name for name in names if name in wanted]


def _is_mark(field: pa.Field, layout: RecordLayout) -> bool:
    """True if a column beside token ids may mark the loss: by its name, or as it holds lists other than of texts."""
    if layout.schema not in OF_TOKENS or field.name in HARMLESS:
        return False
    is_lists = any(is_kind(field.type) for is_kind in _LISTS)
    return may_say(field.name) or (is_lists and not any(is_kind(field.type.value_type) for is_kind in _TEXTS))


def _too_large_rows(
    batch: pa.RecordBatch, is_chosen: BoolArray, max_record_bytes: int
) -> list[tuple[int, RecordError]]:
    """The chosen rows that are too large, with their errors; they are chosen no more."""
    large = []
    for index in np.flatnonzero(is_chosen).tolist() if batch.nbytes > max_record_bytes else ():
        num_bytes = batch.slice(index, 1).nbytes
        if num_bytes > max_record_bytes:
            is_chosen[index] = False
            large.append((index, too_large(num_bytes, max_record_bytes)))
    return large


def _decode(
    batch: pa.RecordBatch, layout: RecordLayout | None
) -> tuple[list[Row] | LengthColumn, Mapping[str, int | None]]:
    """The rows of a batch; lengths as a column where no row has to be looked at, with the other keys counted."""
    if layout is None or layout.schema != "length":
        is_tokens = layout is not None and layout.schema in OF_TOKENS
        return (_token_rows if is_tokens else _rows)(batch), {}
    return lengths_of(batch, layout) or (_rows(batch), {})


def _rows(batch: pa.RecordBatch) -> list[Row]:
    """Every row as keys and values. What is null is left out: Arrow has every key in every row, records have not."""
    try:
        return [_without_nulls(row) for row in batch.to_pylist()]
    except UnicodeDecodeError as error:
        if len(batch) > 1:
            return [row for index in range(len(batch)) for row in _rows(batch.slice(index, 1))]
        message = f"not UTF-8: byte 0x{error.object[error.start]:02x} at byte {error.start} of a text ({error.reason})"
        return [RecordError(message, reason="not-utf8", hint="write the file again, with text as UTF-8")]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        first = next((inner for inner in value if inner is not None), None)  # the others are of its type
        return [_without_nulls(inner) for inner in value] if isinstance(first, (dict, list, bytes)) else value
    return value.decode() if isinstance(value, bytes) else value


def _token_rows(batch: pa.RecordBatch) -> list[Row]:
    """Like `_rows`, for records of token ids: lists of whole numbers that fit int32 become int32 arrays, [n], and
    lists of other numbers arrays of these."""
    names = [name for name in batch.schema.names if _are_numbers(batch.column(name))]
    others = batch.drop_columns(names)
    found: list[Row] = _rows(others) if others.num_columns else [{} for _ in range(len(batch))]
    for name in names:
        column = batch.column(name)
        present = is_valid(column)
        values = to_numpy(column.flatten())  # without what is behind a null
        values = values if values.dtype.kind == "f" else values.astype(np.int32)
        offsets = offsets_of(np.where(present, np.diff(to_numpy(column.offsets)), 0)).tolist()
        for index, row in enumerate(found):
            if present[index] and isinstance(row, dict):
                row[name] = values[offsets[index] : offsets[index + 1]]
    return found


def _are_numbers(column: pa.Array) -> bool:
    """True if a column has lists of whole numbers that all fit int32, or lists of other numbers."""
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    is_whole = pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)
    if not (is_whole or pa.types.is_floating(kind.value_type)):
        return False
    values = column.flatten()
    numbers = to_numpy(values)
    if values.null_count or not is_whole:
        return not values.null_count
    return bool(not numbers.size or (numbers.min() >= _INT32.min and numbers.max() <= _INT32.max))


def _mark(column: pa.Array) -> pa.Array:
    """Mask of the values that hold anything, bool [n]: false for empty lists, texts and objects, null for null.

    Stands in for values whose presence alone has a record refused: images are not decoded for it.
    """
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


def _num_rows(table: TableFile, piece: Piece) -> int:
    return sum(group.num_rows for group in islice(table.row_groups(), piece.start, piece.stop))
