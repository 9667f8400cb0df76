"""Text files: each is one piece, and one record."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from chunkplan.intake.pieces import Piece
from chunkplan.intake.readers.rows import BOM, Row, RowBlock, sampled, too_large
from chunkplan.intake.readers.streams import chunks
from chunkplan.intake.records import RecordError
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.sources import SourceFile


def cut(file: SourceFile, source: int, folder: Path) -> Iterator[Piece]:
    """The file as one piece."""
    num_bytes, how = file.num_bytes or 0, file.compression
    yield Piece(source, 0, file.path, "text", 0, 1, origin=0, num_bytes=num_bytes, share=num_bytes, compression=how)


def rows(
    piece: Piece, layout: RecordLayout | None, max_rows: int, max_record_bytes: int, sample: float | None
) -> Iterator[RowBlock]:
    """The one record of a text file, which is rejected where the file cannot be read."""
    found = [_text(piece, max_record_bytes)] if sampled(np.zeros(1, np.int64), sample)[0] else []
    yield RowBlock(found, np.arange(len(found)), 1, 1, piece.num_bytes)


def digest(piece: Piece) -> str:
    """SHA-256 of the content; of a file that cannot be read, of so much as can be."""
    hasher = hashlib.sha256()
    try:
        for data in chunks(piece.path, piece.compression):
            hasher.update(data)
    except RecordError as error:
        hasher.update(error.message.encode())
    return hasher.hexdigest()


def num_rows(piece: Piece) -> int:
    """One: the whole text."""
    return 1


def alone(piece: Piece, number: int, folder: Path) -> Piece:
    """The piece as it is."""
    return piece


def _text(piece: Piece, max_record_bytes: int) -> Row:
    held: list[bytes] = []
    num_bytes = 0
    try:
        for data in chunks(piece.path, piece.compression):
            num_bytes += len(data)
            held = [*held, data] if num_bytes <= max_record_bytes else []
    except RecordError as error:
        if not piece.num_bytes and piece.compression is None:  # of a corpus, not damage
            return RecordError(error.message, reason="empty", hint=error.hint)
        return error
    if num_bytes > max_record_bytes:
        return too_large(num_bytes, max_record_bytes)
    content = b"".join(held).removeprefix(BOM)
    try:
        return {"text": content.decode()}
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{content[error.start]:02x} at byte {error.start} ({error.reason})"
        return RecordError(message, reason="not-utf8", hint="convert the file to UTF-8")
