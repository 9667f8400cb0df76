"""Files of tables, Parquet and Arrow: their row groups (record batches), read in batches of bounded memory."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from chunkplan.intake import pieces
from chunkplan.intake.files import is_url, open_file, reading
from chunkplan.intake.readers.rows import unreadable
from chunkplan.intake.readers.streams import check_head
from chunkplan.intake.records import RecordError

#: First bytes of Arrow IPC files; streams, as Hugging Face `save_to_disk` writes, do not have them.
_ARROW_FILE = b"ARROW1"

_HEAD_BYTES = 64

#: What Parquet files begin with whose footer is encrypted. If only columns are, the footer is followed by a signature.
_ENCRYPTED = b"PARE"
_SIGNATURE_BYTES = 28

#: At the end of a Parquet file: how long its footer is, and the four bytes it began with.
_END_BYTES = 8


class RowGroup(NamedTuple):
    """A row group of Parquet, or a record batch of Arrow: `num_bytes` of data in about `stored` bytes of the file."""

    num_rows: int
    num_bytes: int
    stored: int


class UnreadableRows(NamedTuple):
    """Rows of a row group that cannot be read, and why."""

    num_rows: int
    error: RecordError


@contextmanager
def open_table(path: str, kind: str, *, is_look: bool = False) -> Iterator[TableFile]:
    """A Parquet or Arrow file, which may be read as long as the context is.

    With `is_look` little is fetched at once, as only its schema or its first rows are read.
    Raises RecordError: unreadable: empty, a pointer of Git LFS, torn, encrypted, or not a file of its kind; also while
    it is read; UsageError: the file cannot be read.
    """
    block_bytes = pieces.LOOK_BYTES if is_look else pieces.BLOCK_BYTES
    with reading(path), open_file(path, block_bytes if is_look else None) as file:
        head = file.read(_HEAD_BYTES)
        check_head(head, path)
        file.seek(0)
        try:
            table = _Parquet(path, file, head, block_bytes) if kind == "parquet" else _Arrow(path, file, head)
            names = table.schema.names
            if len(set(names)) < len(names):
                raise unreadable("several columns of the same name", path, hint="write it again with other names")
            yield table
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # names may not be text
            message = f"not a {kind} file, or it is torn: {_damage(error)}"
            raise unreadable(message, path, hint="fetch or write the file again") from error


class _Parquet:
    """A Parquet file; see `_Arrow` for its methods."""

    def __init__(self, path: str, file: Any, head: bytes, block_bytes: int) -> None:
        self._path = path
        self._file = file
        encrypted = unreadable(
            "it is encrypted, or some of its columns are", path, hint="write it again without encryption"
        )
        if head.startswith(_ENCRYPTED):
            raise encrypted
        # Of a row group of any size only a few pages are in memory.
        self._table = pq.ParquetFile(file, buffer_size=block_bytes, pre_buffer=False)
        self.schema = self._table.schema_arrow
        # To look at a column that is encrypted, even at its metadata, ends the process.
        file.seek(-_END_BYTES, os.SEEK_END)
        num_bytes = int.from_bytes(file.read(_END_BYTES)[:4], "little")
        if num_bytes == self._table.metadata.serialized_size + _SIGNATURE_BYTES:
            raise encrypted

    def row_groups(self) -> Iterator[RowGroup]:
        for group in self._groups(0, sys.maxsize):
            stored = sum(chunk.total_compressed_size for chunk in _chunks(group))
            yield RowGroup(group.num_rows, group.total_byte_size, stored)

    def batches(
        self, start: int, stop: int, columns: list[str], max_rows: int
    ) -> Iterator[pa.RecordBatch | UnreadableRows]:
        for index, group in enumerate(self._groups(start, stop), start):
            own = [chunk for chunk in _chunks(group) if chunk.path_in_schema.split(".")[0] in columns]
            num_rows = _rows_in(sum(chunk.total_uncompressed_size for chunk in own), group.num_rows, max_rows)
            num_left = group.num_rows
            message, reason = "it ends too early", "unreadable"
            try:
                for batch in self._table.iter_batches(num_rows, row_groups=[index], columns=columns, use_threads=False):
                    num_left -= batch.num_rows
                    yield batch
            except (pa.ArrowException, OSError) as error:
                message = _damage(error)
                reason = "not-utf8" if "Invalid UTF8" in message else reason  # of a column whose values are listed once
            message, hint = f"row group {index} cannot be read to its end: {message}", "fetch or write the file again"
            lost = RecordError(message, reason=reason, where=self._path, hint=hint)
            while num_left > 0:
                yield UnreadableRows(min(num_left, max_rows), lost)
                num_left -= max_rows

    def digest(self, start: int, stop: int) -> str:
        hasher = hashlib.sha256(self.schema.serialize())
        for group in self._groups(start, stop):
            begins, ends = [0], [0]
            for chunk in _chunks(group):
                offsets = filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset))
                begins.append(min(offsets, default=0))
                ends.append(begins[-1] + chunk.total_compressed_size)
            at, end = min(begins[1:], default=0), max(ends)
            hasher.update(f"{group.num_rows} {end - at} ".encode())
            self._file.seek(at)
            while at < end and (data := self._file.read(min(pieces.BLOCK_BYTES, end - at))):
                hasher.update(data)
                at += len(data)
        return hasher.hexdigest()

    def _groups(self, start: int, stop: int) -> Iterator[Any]:
        metadata = self._table.metadata
        return (metadata.row_group(index) for index in range(start, min(stop, metadata.num_row_groups)))


class _Arrow:
    """An Arrow file or stream."""

    def __init__(self, path: str, file: Any, head: bytes) -> None:
        # What is mapped is not copied; only what is looked at comes into memory.
        self._source = pa.PythonFile(file, mode="r") if is_url(path) else pa.memory_map(path)
        self._is_file = head.startswith(_ARROW_FILE)
        self._open = pa.ipc.open_file if self._is_file else pa.ipc.open_stream
        self.schema = self._open(self._source).schema

    def row_groups(self) -> Iterator[RowGroup]:
        """The row groups in order; of a file that is cut short, those before the cut, then the error."""
        for batch in self._read(0, sys.maxsize):
            yield RowGroup(batch.num_rows, batch.nbytes, batch.nbytes)

    def batches(
        self, start: int, stop: int, columns: list[str], max_rows: int
    ) -> Iterator[pa.RecordBatch | UnreadableRows]:
        """Some columns of the rows of row groups [start, stop), in order, in batches of about `BLOCK_BYTES`.

        No more than there are; of a row group that is damaged, all rows behind the damage are lost.
        """
        for batch in self._read(start, stop):
            chosen = batch.select(columns)
            num_rows = _rows_in(chosen.nbytes, batch.num_rows, max_rows)
            for row in range(0, batch.num_rows, num_rows):
                yield chosen.slice(row, num_rows)

    def digest(self, start: int, stop: int) -> str:
        """SHA-256 of the schema and the batches as Arrow writes them, with whatever their padding holds."""
        sink = _Hash()
        with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), self.schema) as writer:
            for batch in self._read(start, stop):
                writer.write_batch(batch)
        return sink.hasher.hexdigest()

    def _read(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Batches [start, stop), of which every value is known to be within the file, if not to be what it should."""
        self._source.seek(0)
        table = self._open(self._source)
        wanted = range(start, min(stop, table.num_record_batches)) if self._is_file else range(0)
        for batch in map(table.get_batch, wanted) if self._is_file else islice(table, start, stop):
            batch.validate()
            for column in batch.columns:
                column.view(_without_text(column.type)).validate(full=True)
            yield batch


class _Hash:
    """A file of which only the hash is kept."""

    closed = False

    def __init__(self) -> None:
        self.hasher = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.hasher.update(data)
        return len(data)


def _without_text(kind: pa.DataType) -> pa.DataType:
    """A type with bytes in place of text, so that offsets are checked and UTF-8 is not: readers of rows check that."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _without_text(kind.value_type), kind.ordered)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_text(field.type)) for field in kind])
    for is_kind, made in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_kind(kind):
            return made(kind.value_field.with_type(_without_text(kind.value_type)))
    return kind


def _damage(error: Exception) -> str:
    """Arrow's error for a file, in one line; errors of the system or of a server are raised again."""
    if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
        raise error
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _chunks(group: Any) -> Iterator[Any]:
    return (group.column(index) for index in range(group.num_columns))


def _rows_in(num_bytes: int, num_rows: int, max_rows: int) -> int:
    """Number of rows to read at once from a table of `num_rows` rows and `num_bytes` bytes."""
    return max(1, min(max_rows, pieces.BLOCK_BYTES * num_rows // max(num_bytes, 1)))


TableFile = _Parquet | _Arrow
