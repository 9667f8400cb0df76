"""Tables: pieces are row groups of Parquet, or record batches of Arrow; every row is one record or rejected."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from chunkplan.arrays import BoolArray, Int64Array
from chunkplan.intake import pieces
from chunkplan.intake.files import is_url
from chunkplan.intake.pieces import Batch, LengthColumn, Piece, TokenColumns
from chunkplan.intake.readers.arrow_rows import is_mark, mark_suspects, plain_batch, rows, token_rows
from chunkplan.intake.readers.columns import COLUMN_ROLES, are_columns, complete
from chunkplan.intake.readers.parsing import parse_rows, rejection, sampled, too_large
from chunkplan.intake.readers.stream import fetch, unreadable
from chunkplan.intake.readers.table_files import Lost, TableFile, open_table
from chunkplan.intake.records import JsonObject, Record
from chunkplan.intake.rejection import RecordError, Rejected
from chunkplan.intake.schemas import SCHEMAS, RecordLayout
from chunkplan.intake.schemas.messages import SUSPECT
from chunkplan.intake.schemas.unread import is_looked_at, named
from chunkplan.intake.sources import SourceFile
from chunkplan.planfile.arrow import to_arrow


def cut(file: SourceFile, source: int, folder: Path) -> Iterator[Piece]:
    """The pieces of a table: whole row groups up to about `PIECE_BYTES`, or one larger row group.

    Arrow behind a URL cannot be cut: it is copied into `folder`, as one piece.

    Raises:
        RecordError: unreadable: not a table, torn, or without rows; after the pieces before the damage.
        UsageError: the file cannot be read.
    """
    is_copy = is_spooled(file)
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


def is_spooled(file: SourceFile) -> bool:
    """Whether a file is copied before it is read."""
    return file.kind == "arrow" and is_url(file.path)


def length_column(file: SourceFile) -> str | None:
    """The name of the only column of a table, if that has whole numbers.

    Raises:
        RecordError: unreadable.
        UsageError: the file cannot be read.
    """
    with open_table(file.path, file.kind, is_look=True) as table:
        only = table.schema.field(0) if len(table.schema) == 1 else None
    return str(only.name) if only is not None and pa.types.is_integer(only.type) else None


def read(piece: Piece, layout: RecordLayout, *, max_record_bytes: int, sample: float | None = None) -> Iterator[Batch]:
    """The records of a piece in batches; rows that are lost to damage are rejected each.

    Of a file that cannot even be opened any more, all is one that is rejected.

    Raises:
        UsageError: the file cannot be read.
    """
    max_rows = pieces.COLUMN_RECORDS if layout.schema in COLUMN_ROLES else pieces.BATCH_RECORDS
    row, total = 0, 0
    not_wanted: list[str] = []  # of columns that are not read it is not known which rows have a value

    def batch_of(found: pa.RecordBatch | Lost) -> Batch:
        is_chosen = sampled(piece.origin + row + np.arange(found.num_rows), sample)
        numbers: Int64Array = np.empty(0, np.int64)
        records: list[Record] | LengthColumn | TokenColumns = []
        unread: dict[str, int | None] = {}
        if isinstance(found, Lost):
            rejected = [rejection(number, found.error) for number in (row + np.flatnonzero(is_chosen)).tolist()]
        else:
            numbers, records, rejected, counted = _read(found, is_chosen, row, layout, max_record_bytes)
            unread = dict.fromkeys(not_wanted) | counted if len(numbers) else {}
        before, behind = (piece.num_bytes * rows // total for rows in (row, row + found.num_rows))
        return Batch(numbers, records, found.num_rows, found.num_rows, behind - before, rejected, unread)

    try:
        with open_table(piece.path, piece.reader) as table:
            total = sum(group.num_rows for group in islice(table.row_groups(), piece.start, piece.stop))
            wanted = _wanted(table, layout)
            not_wanted = [
                named(field.name)
                for field in table.schema
                if field.name not in wanted and not pa.types.is_null(field.type)
            ]
            for found in table.batches(piece.start, piece.stop, wanted, max_rows):
                yield batch_of(found)
                row += found.num_rows
    except RecordError as error:
        if total:
            yield batch_of(Lost(total - row, error))
        else:
            yield Batch(np.empty(0, np.int64), [], 1, 0, piece.num_bytes, [rejection(-1, error)])


def first_records(piece: Piece, count: int, max_record_bytes: int) -> list[JsonObject]:
    """The first `count` rows that can be read, with all their columns; if all are lost, rows behind the piece.

    Raises:
        RecordError: unreadable.
        UsageError: the file cannot be read.
    """
    found: list[JsonObject] = []
    with open_table(piece.path, piece.reader, is_look=True) as table:
        for start, stop in ((piece.start, piece.stop), (piece.stop, sys.maxsize)):
            for batch in table.batches(start, stop, table.schema.names, count):
                if isinstance(batch, pa.RecordBatch):
                    found += [row for row in rows(mark_suspects(batch, ())) if isinstance(row, dict)]
                if len(found) >= count:
                    break
            if found:
                break
    return found[:count]


def digest(piece: Piece) -> str:
    """SHA-256 of what is read: of Parquet the raw bytes, of Arrow the data.

    Raises:
        RecordError: unreadable.
        UsageError: the file cannot be read.
    """
    with open_table(piece.path, piece.reader) as table:
        return table.digest(piece.start, piece.stop)


def num_rows(piece: Piece) -> int:
    """How many rows there are.

    Raises:
        RecordError: unreadable.
        UsageError: the file cannot be read.
    """
    with open_table(piece.path, piece.reader) as table:
        return sum(group.num_rows for group in islice(table.row_groups(), piece.start, piece.stop))


def alone(piece: Piece, number: int, folder: Path) -> Piece:
    """The piece of one row, which is written into `folder` with all of its columns.

    Raises:
        RecordError: the row is lost to damage.
        UsageError: the file cannot be read.
    """
    path = folder / "row.arrow"
    before, index = 0, piece.start
    with open_table(piece.path, piece.reader) as table:
        for group in islice(table.row_groups(), piece.start, piece.stop):
            if number < before + group.num_rows:
                break
            before, index = before + group.num_rows, index + 1
        for found in table.batches(index, index + 1, table.schema.names, pieces.BATCH_RECORDS):
            if number < before + found.num_rows:
                break
            before += found.num_rows
        if isinstance(found, Lost):
            raise found.error
        with pa.ipc.new_file(str(path), found.schema) as file:
            file.write_batch(found.slice(number - before, 1))
    origin = piece.origin + number
    return replace(piece, path=str(path), reader="arrow", start=0, stop=1, origin=origin, is_temporary=True)


def _wanted(table: TableFile, layout: RecordLayout) -> list[str]:
    """The columns that records of the layout may have, and those they are refused for.

    All if there are none of the former, for errors to say what there is. None of those that are ignored.
    """
    names = [name for name in table.schema.names if name not in layout.ignored]
    keys = SCHEMAS[layout.schema].all_keys(layout.columns)
    if keys.isdisjoint(names):
        return names
    more = (name for name in names if is_looked_at(name, layout.schema) or is_mark(table.schema.field(name), layout))
    wanted = keys | SUSPECT.union(more)
    return [name for name in names if name in wanted]


def _read(
    batch: pa.RecordBatch, is_chosen: BoolArray, row: int, layout: RecordLayout, max_record_bytes: int
) -> tuple[Int64Array, list[Record] | LengthColumn | TokenColumns, list[Rejected], Counter[str]]:
    """The records of the chosen rows of a batch whose first is `row` of the piece."""
    rejected: list[Rejected] = []
    batch = mark_suspects(batch, layout.columns.values())
    if batch.nbytes > max_record_bytes:
        for index in np.flatnonzero(is_chosen).tolist():
            num_bytes = batch.slice(index, 1).nbytes
            if num_bytes > max_record_bytes:
                is_chosen[index] = False
                rejected.append(rejection(row + index, too_large(num_bytes, max_record_bytes)))
    numbers = row + np.flatnonzero(is_chosen)
    batch = _take(batch, is_chosen)
    plain = plain_batch(batch, layout) if are_columns(layout) else None
    as_rows = token_rows if layout.schema == "input_ids" else rows
    records: list[Record] | LengthColumn | TokenColumns
    if plain is None:
        kept, records, wrong, unread = parse_rows(layout, as_rows(batch), numbers.tolist())
        numbers = np.array(kept, np.int64)
    else:
        numbers, records, wrong, unread = complete(plain, layout, as_rows(_take(batch, ~plain.taken)), numbers)
    return numbers, records, sorted(rejected + wrong), unread


def _take(batch: pa.RecordBatch, is_taken: BoolArray) -> pa.RecordBatch:
    return batch if is_taken.all() else batch.take(to_arrow(np.flatnonzero(is_taken)))
