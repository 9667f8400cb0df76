"""Readers: sources of every kind cut into pieces, and pieces read as batches of records; one kind a module.

What is read does not depend on how it is cut, and every record is read, rejected with its reason, or left out by the
sample: none is lost. A module has `rows`, `digest`, `num_rows` and `alone`, which the functions here document. All
raise RecordError for a file that is unreadable, and UsageError for one that cannot be opened.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from chunkplan.config.intake import MAX_RECORD_BYTES
from chunkplan.intake import pieces
from chunkplan.intake.files import is_url
from chunkplan.intake.pieces import Batch, Piece
from chunkplan.intake.readers import lines, numpy_files, streams, tables, texts
from chunkplan.intake.readers.rows import make_batch
from chunkplan.intake.records import JsonObject
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.schemas.tokens import OF_TOKENS
from chunkplan.intake.sources import SourceFile

__all__ = ["alone", "cut", "default_columns", "digest", "first_records", "is_stream", "num_rows", "read"]

#: By `Piece.reader`; elements of JSON are spooled as lines.
_READERS: dict[str, ModuleType] = {
    **dict.fromkeys(("lines", "elements"), lines),
    **dict.fromkeys(("parquet", "arrow"), tables),
    "text": texts,
    "npy": numpy_files,
}

#: By `SourceFile.kind`: what cuts a source of it.
_CUTS = {
    **dict.fromkeys(("jsonl", "json", "csv", "tsv"), streams.cut),
    **dict.fromkeys(("parquet", "arrow"), tables.cut),
    "text": texts.cut,
    "npy": numpy_files.cut,
}

#: Detection reads no further than this: a list of numbers takes ten times its bytes when it is decoded.
_FIRST_BYTES = 8 << 20


def cut(file: SourceFile, source: int, spool: Path) -> Iterator[Piece]:
    """The pieces of the source with index `source`, each made when it is asked for; temporary ones are in `spool`.

    Raises RecordError, with its file, after all pieces that can be read; UsageError also for a full disk.
    """
    return (streams.cut if file.text_split else _CUTS[file.kind])(file, source, spool)


def is_stream(file: SourceFile) -> bool:
    """True if cutting a source into pieces takes reading all of it. True for JSON, which may be an array."""
    if file.kind in ("arrow", "npy"):
        return is_url(file.path)
    is_always = file.kind in ("json", "csv", "tsv") or file.text_split is not None
    return is_always or (file.kind == "jsonl" and streams.is_spooled(file))


def default_columns(file: SourceFile) -> dict[str, str]:
    """Name the length column of a file that can hold nothing else: .npy, a table of one column of integers."""
    if file.kind == "npy":
        return {"length": numpy_files.KEY}
    name = tables.length_column(file) if file.kind in ("parquet", "arrow") else None
    return {"length": name} if name is not None else {}


def first_records(piece: Piece, count: int = 100, *, max_record_bytes: int = MAX_RECORD_BYTES) -> list[JsonObject]:
    """The first `count` records of a piece, as they are, fewer if they are large: to find out how they are laid out.

    Those that are no objects, or too large, are passed over. Of a table whose piece has none, rows behind it are read.
    """
    if piece.reader == "text":
        return [{"text": piece.path}]  # as all text files have it; the file is not read
    found: list[JsonObject] = []
    num_bytes = 0
    for block in _READERS[piece.reader].rows(piece, None, count, max_record_bytes, None):
        found += [row for row in block.rows if isinstance(row, dict)]
        num_bytes += block.num_bytes
        if len(found) >= count or num_bytes >= _FIRST_BYTES:
            break
    if not found and _READERS[piece.reader] is tables and piece.stop < sys.maxsize:
        piece = replace(piece, start=piece.stop, stop=sys.maxsize)
        return first_records(piece, count, max_record_bytes=max_record_bytes)
    return found[:count]


def read(piece: Piece, layout: RecordLayout, *, max_record_bytes: int, sample: float | None = None) -> Iterator[Batch]:
    """The records of a piece in batches, and the rejections.

    Args:
        piece: what to read.
        layout: how its records are laid out.
        max_record_bytes: larger records are rejected; JSON lines and text are then not held in memory.
        sample: the share of records to read, by a hash of their position in the source.
    """
    max_rows = pieces.COLUMN_RECORDS if layout.schema in ("length", *OF_TOKENS) else pieces.BATCH_RECORDS
    for block in _READERS[piece.reader].rows(piece, layout, max_rows, max_record_bytes, sample):
        yield make_batch(layout, block)


def digest(piece: Piece) -> str:
    """SHA-256 of what a piece reads: of lines, of the rows of a table, of a text."""
    return str(_READERS[piece.reader].digest(piece))


def num_rows(piece: Piece) -> int:
    """Number of lines or rows of a piece, blank ones included."""
    return int(_READERS[piece.reader].num_rows(piece))


def alone(piece: Piece, number: int, folder: Path) -> Piece:
    """A piece with only the line or row `number` of a piece, read as among the others; temporary files go to `folder`.

    Raises RecordError for a row that is lost to damage.
    """
    found: Piece = _READERS[piece.reader].alone(piece, number, folder)
    return found
