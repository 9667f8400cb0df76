"""Plain text files: one is one record."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from chunkplan.intake.pieces import Batch, Piece
from chunkplan.intake.readers.parsing import Row, parse_rows, sampled, too_large
from chunkplan.intake.readers.stream import chunks
from chunkplan.intake.records import JsonObject
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.sources import SourceFile

_BOM = b"\xef\xbb\xbf"


def cut(file: SourceFile, source: int, folder: Path) -> Iterator[Piece]:
    """The file as one piece."""
    num_bytes = file.num_bytes or 0
    yield Piece(
        source, 0, file.path, "text", 0, 1, origin=0, num_bytes=num_bytes, share=num_bytes, compression=file.compression
    )


def read(piece: Piece, layout: RecordLayout, *, max_record_bytes: int, sample: float | None = None) -> Iterator[Batch]:
    """The one record of a file, which is rejected where the file cannot be read.

    Raises:
        UsageError: the file cannot be opened.
    """
    row: list[Row] = []
    if sampled(np.zeros(1, np.int64), sample)[0]:
        row.append(_record(piece, max_record_bytes))
    parsed = parse_rows(layout, row, range(len(row)))
    yield Batch(np.array(parsed.numbers, np.int64), parsed.records, 1, 1, piece.num_bytes, parsed.rejected)


def first_records(piece: Piece, count: int, max_record_bytes: int) -> list[JsonObject]:
    """A record as all text files have it; the file is not read."""
    return [{"text": piece.path}]


def digest(piece: Piece) -> str:
    """SHA-256 of the content; of a file that cannot be read, of so much as can be."""
    hasher = hashlib.sha256()
    try:
        for data in _content(piece):
            hasher.update(data)
    except RecordError as error:
        hasher.update(error.message.encode())
    return hasher.hexdigest()


def num_rows(piece: Piece) -> int:
    """A file is one record."""
    return 1


def alone(piece: Piece, number: int, folder: Path) -> Piece:
    """The piece as it is."""
    return piece


def _content(piece: Piece) -> Iterator[bytes]:
    return chunks(piece.path, piece.compression)


def _record(piece: Piece, max_record_bytes: int) -> Row:
    held: list[bytes] = []
    num_bytes = 0
    try:
        for data in _content(piece):
            num_bytes += len(data)
            held = [*held, data] if num_bytes <= max_record_bytes else []
    except RecordError as error:
        if not piece.num_bytes and piece.compression is None:  # of a corpus, not damage
            return RecordError(error.message, reason="empty", hint=error.hint)
        return error
    if num_bytes > max_record_bytes:
        return too_large(num_bytes, max_record_bytes)
    content = b"".join(held).removeprefix(_BOM)
    try:
        return {"text": content.decode()}
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{content[error.start]:02x} at byte {error.start} ({error.reason})"
        return RecordError(message, reason="not-utf8", hint="convert the file to UTF-8")
