"""Readers: sources of every kind cut into pieces, and pieces read as batches of records; one kind a file.

What is read does not depend on how it is cut, and every record is read, rejected with its reason, or left out by the
sample: none is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from chunkplan.config.intake import MAX_RECORD_BYTES
from chunkplan.intake.pieces import Batch, Piece
from chunkplan.intake.readers import lines, numpy_files, streams, tables
from chunkplan.intake.records import JsonObject
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.sources import SourceFile

__all__ = ["alone", "cut", "default_columns", "digest", "first_records", "is_stream", "num_rows", "read"]


class _Reader(NamedTuple):
    """How pieces of one kind are read."""

    read: Callable[..., Iterator[Batch]]
    first_records: Callable[[Piece, int, int], list[JsonObject]]
    digest: Callable[[Piece], str]
    num_rows: Callable[[Piece], int]
    alone: Callable[[Piece, int, Path], Piece]


class _Kind(NamedTuple):
    """How sources of one kind are cut; `is_spooled` says whether they are read once, into temporary pieces."""

    cut: Callable[[SourceFile, int, Path], Iterator[Piece]]
    is_spooled: Callable[[SourceFile], bool]


_LINES, _TABLE, _NUMPY = (
    _Reader(kind.read, kind.first_records, kind.digest, kind.num_rows, kind.alone)
    for kind in (lines, tables, numpy_files)
)
_TEXT = _Reader(
    streams.read_text,
    lambda piece, count, limit: [{"text": piece.path}],  # as all text files have it; the file is not read
    streams.digest_text,
    lambda piece: 1,
    lambda piece, number, folder: piece,
)

#: By `Piece.reader`; elements of JSON are spooled as lines.
_READERS = {
    "lines": _LINES,
    "elements": _LINES,
    "parquet": _TABLE,
    "arrow": _TABLE,
    "text": _TEXT,
    "npy": _NUMPY,
}

#: By `SourceFile.kind`.
_KINDS = {
    "jsonl": _Kind(streams.cut, streams.is_spooled),
    "json": _Kind(streams.cut, lambda file: True),  # only its content says whether it is an array
    "parquet": _Kind(tables.cut, tables.is_spooled),
    "arrow": _Kind(tables.cut, tables.is_spooled),
    "text": _Kind(streams.text_piece, lambda file: False),
    "npy": _Kind(numpy_files.cut, numpy_files.is_spooled),
}


def cut(file: SourceFile, source: int, spool: Path) -> Iterator[Piece]:
    """The pieces of the source with index `source`, each made when it is asked for; temporary ones are in `spool`.

    Raises:
        RecordError: unreadable, with its file; after all pieces that can be read.
        UsageError: the file cannot be opened, or the disk has no room for temporary pieces.
    """
    return _KINDS[file.kind].cut(file, source, spool)


def is_stream(file: SourceFile) -> bool:
    """Whether all of a source has to be read to cut it, by whoever cuts it. True for JSON, which may be an array."""
    return _KINDS[file.kind].is_spooled(file)


def default_columns(file: SourceFile) -> dict[str, str]:
    """Which column has the lengths, of a file that can hold nothing else: .npy, and tables of one column of integers.

    Raises:
        RecordError: unreadable.
        UsageError: the file cannot be read.
    """
    if file.kind == "npy":
        return {"length": numpy_files.KEY}
    name = tables.length_column(file) if file.kind in ("parquet", "arrow") else None
    return {"length": name} if name is not None else {}


def first_records(piece: Piece, count: int = 100, *, max_record_bytes: int = MAX_RECORD_BYTES) -> list[JsonObject]:
    """The first `count` records of a piece that can be read, as they are: to find out how they are laid out.

    Raises:
        RecordError: unreadable.
        UsageError: the file cannot be opened.
    """
    return _READERS[piece.reader].first_records(piece, count, max_record_bytes)


def read(piece: Piece, layout: RecordLayout, *, max_record_bytes: int, sample: float | None = None) -> Iterator[Batch]:
    """The records of a piece in batches, and what is rejected.

    Args:
        piece: what to read.
        layout: how its records are laid out.
        max_record_bytes: larger records are rejected; JSON lines and text are then not held in memory.
        sample: the share of records to read, by a hash of their position in the source.

    Raises:
        UsageError: the file cannot be opened.
    """
    return _READERS[piece.reader].read(piece, layout, max_record_bytes=max_record_bytes, sample=sample)


def digest(piece: Piece) -> str:
    """SHA-256 of what a piece reads: of lines, of the rows of a table, of a text.

    Raises:
        RecordError: unreadable.
        UsageError: the file cannot be opened.
    """
    return _READERS[piece.reader].digest(piece)


def num_rows(piece: Piece) -> int:
    """How many lines or rows a piece has, with blank ones.

    Raises:
        RecordError: unreadable.
        UsageError: the file cannot be opened.
    """
    return _READERS[piece.reader].num_rows(piece)


def alone(piece: Piece, number: int, folder: Path) -> Piece:
    """The piece that has nothing but the line or row `number` of a piece; what has to be written for it is in `folder`.

    It is read as it would be among the others.

    Raises:
        RecordError: the row is lost to damage.
        UsageError: the file cannot be opened.
    """
    return _READERS[piece.reader].alone(piece, number, folder)
