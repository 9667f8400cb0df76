"""Lengths in a .npy file: one row of whole numbers, each of which is a record."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from chunkplan.intake import pieces
from chunkplan.intake.files import is_url, open_file, reading
from chunkplan.intake.pieces import LengthColumn, Piece
from chunkplan.intake.readers.rows import Row, RowBlock, are_lengths, sampled, unreadable
from chunkplan.intake.readers.streams import check_head, fetch
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.sources import SourceFile

#: First bytes of numpy files.
_MAGIC = b"\x93NUMPY"

#: Key of the lengths in such a file.
KEY = "length"


def cut(file: SourceFile, source: int, folder: Path) -> Iterator[Piece]:
    """The pieces of a file, which is copied into `folder` if it is behind a URL."""
    is_copy = is_url(file.path)
    path = fetch(file.path, folder / f"source-{source:05}.npy") if is_copy else file.path
    values = _open(path, file.path)
    rows = len(values) if is_copy else max(1, pieces.PIECE_BYTES // values.itemsize)
    for index, start in enumerate(range(0, len(values), rows)):
        stop = min(start + rows, len(values))
        num_bytes = (stop - start) * values.itemsize
        yield Piece(source, index, path, "npy", start, stop, start, is_copy, num_bytes, share=num_bytes)


def rows(
    piece: Piece, layout: RecordLayout | None, max_rows: int, max_record_bytes: int, sample: float | None
) -> Iterator[RowBlock]:
    """Implements `readers.read`."""
    values = _values(piece)
    for start in range(0, len(values), max_rows):
        lengths = np.array(values[start : start + max_rows])
        chosen = start + np.flatnonzero(sampled(piece.start + start + np.arange(len(lengths)), sample))
        found = values[chosen]
        decoded: list[Row] | LengthColumn
        if layout is not None and are_lengths(found):
            decoded = LengthColumn(found.astype(np.int32))
        else:
            decoded = [{KEY: value} for value in found.tolist()]
        yield RowBlock(decoded, chosen, len(lengths), len(lengths), lengths.nbytes)


def digest(piece: Piece) -> str:
    """SHA-256 of the type and the numbers."""
    values = _values(piece)
    return hashlib.sha256(values.dtype.str.encode() + values.tobytes()).hexdigest()


def num_rows(piece: Piece) -> int:
    """Number of lengths of a piece."""
    return piece.stop - piece.start


def alone(piece: Piece, number: int, folder: Path) -> Piece:
    """The piece of one length; nothing is written."""
    start, origin = piece.start + number, piece.origin + number
    return replace(piece, start=start, stop=start + 1, origin=origin)


def _values(piece: Piece) -> npt.NDArray[Any]:
    return _open(piece.path, piece.path)[piece.start : piece.stop]


def _open(path: str, shown: str) -> npt.NDArray[Any]:
    """The numbers, mapped into memory; errors name the file as `shown`."""
    with reading(path):
        with open_file(path) as file:
            head = file.read(64)
        check_head(head, shown)
        hint = "save whole numbers with numpy.save"
        if not head.startswith(_MAGIC):
            raise unreadable("not a .npy file: it does not begin as these do", shown, hint=hint)
        try:
            values: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, SyntaxError, TokenError, OverflowError) as error:  # its header is parsed as Python
            raise unreadable(f"not a file of numpy, or it is torn: {error}", shown, hint=hint) from error
    if values.ndim != 1 or values.dtype.kind not in "iu" or not len(values):
        raise unreadable(
            f"{values.dtype} of shape {values.shape}, expected lengths: whole numbers in one row",
            shown,
            hint="save one length for every record; tokens are read as `input_ids` of Parquet or JSON lines",
        )
    return values
