"""JSON lines: pieces are ranges of bytes, and a piece has the lines that begin in its range.

Every line that is not blank is exactly one record, or rejected, or left out by the sample.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array
from chunkplan.intake import pieces
from chunkplan.intake.pieces import Batch, LengthColumn, Piece, TokenColumns
from chunkplan.intake.readers.columns import are_columns, complete
from chunkplan.intake.readers.decode import decode_lines
from chunkplan.intake.readers.line_blocks import LineBlock, hash_lines, line_blocks
from chunkplan.intake.readers.parsing import Row, parse_rows, rejection, sampled, too_large
from chunkplan.intake.records import JsonObject, Record
from chunkplan.intake.rejection import Rejected
from chunkplan.intake.schemas import RecordLayout

_BOM = b"\xef\xbb\xbf"

_SPACES = b" \t\r"

#: Detection reads no further than this: a list of numbers takes ten times its bytes when it is decoded.
_FIRST_BYTES = 8 << 20


class _Lines(NamedTuple):
    """The lines of a block that are to be decoded: bytes [starts, stops) of it, `numbers` within the piece; and more.

    `num_records` counts all lines of the block that are not blank, `num_rows` all.
    """

    starts: Int64Array
    stops: Int64Array
    numbers: Int64Array
    rejected: list[Rejected]
    num_records: int
    num_rows: int


def cut(path: str, source: int, num_bytes: int) -> Iterator[Piece]:
    """The pieces of a local file."""
    for index, start in enumerate(range(0, num_bytes, pieces.PIECE_BYTES)):
        stop = min(start + pieces.PIECE_BYTES, num_bytes)
        yield Piece(source, index, path, "lines", start, stop, origin=start, num_bytes=stop - start, share=stop - start)


def read(piece: Piece, layout: RecordLayout, *, max_record_bytes: int, sample: float | None = None) -> Iterator[Batch]:
    """The records of a piece in batches.

    Raises:
        UsageError: the file cannot be read.
    """
    is_columns = are_columns(layout)
    max_lines = pieces.COLUMN_RECORDS if is_columns else pieces.BATCH_RECORDS
    row = 0
    for block in line_blocks(piece.path, piece.start, piece.stop, max_line_bytes=max_record_bytes, max_lines=max_lines):
        lines = _choose(piece, block, row, max_record_bytes, sample)
        numbers, records, rejected, unread = (_read_columns if is_columns else _read_records)(
            piece, block, lines, layout
        )
        yield Batch(
            numbers,
            records,
            num_records=lines.num_records,
            num_rows=lines.num_rows,
            num_bytes=block.num_bytes,
            rejected=sorted(lines.rejected + rejected),
            unread=unread,
        )
        row += lines.num_rows


def first_records(piece: Piece, count: int, max_record_bytes: int) -> list[JsonObject]:
    """The first `count` objects of a piece, fewer if they are large; passes over lines that are none, or too large."""
    found: list[JsonObject] = []
    num_bytes = 0
    for block in line_blocks(piece.path, piece.start, piece.stop, max_line_bytes=max_record_bytes, max_lines=count):
        lines = _choose(piece, block, 0, max_record_bytes, None)
        found += [row for row in _decode(piece, block, lines.starts, lines.stops) if isinstance(row, dict)]
        num_bytes += len(block.data)
        if len(found) >= count or num_bytes >= _FIRST_BYTES:
            break
    return found[:count]


def digest(piece: Piece) -> str:
    """SHA-256 of the bytes of the lines."""
    return hash_lines(piece.path, piece.start, piece.stop)


def num_rows(piece: Piece) -> int:
    """How many lines there are, with blank ones."""
    return sum(len(block.starts) for block in _blocks(piece))


def alone(piece: Piece, number: int, folder: Path) -> Piece:
    """The piece of one line; nothing is written."""
    for block in _blocks(piece):
        if number < len(block.starts):
            start, stop = (block.offset + int(ends[number]) for ends in (block.starts, block.stops))
            origin = piece.origin + start - piece.start
            return replace(piece, start=start, stop=max(stop, start + 1), origin=origin, num_bytes=stop - start)
        number -= len(block.starts)
    raise AssertionError("the piece has fewer lines")


def _blocks(piece: Piece) -> Iterator[LineBlock]:
    """Its lines, of which long ones are not held."""
    return line_blocks(piece.path, piece.start, piece.stop, max_line_bytes=0, max_lines=sys.maxsize)


def _choose(piece: Piece, block: LineBlock, row: int, max_record_bytes: int, sample: float | None) -> _Lines:
    starts, stops = block.starts, block.stops
    positions = piece.origin + (block.offset - piece.start) + starts
    num_rows = len(starts)
    if positions[0] == 0 and block.data.startswith(_BOM):
        starts = starts.copy()
        starts[0] += len(_BOM)
    is_record = _are_records(block.data, starts, stops)
    num_bytes = stops - starts
    large = num_bytes > max_record_bytes
    chosen = is_record & sampled(positions, sample)
    rejected = []
    for line in np.flatnonzero(chosen & large).tolist():
        error = too_large(int(num_bytes[line]), max_record_bytes)
        rejected.append(rejection(row + line, error))
    chosen &= ~large
    numbers = row + np.flatnonzero(chosen)
    return _Lines(starts[chosen], stops[chosen], numbers, rejected, int(is_record.sum()), num_rows)


def _are_records(data: bytes, starts: Int64Array, stops: Int64Array) -> BoolArray:
    """Which lines are not blank; one that is too large to be held is not."""
    are_records = stops > starts
    if not data:
        return are_records
    first = np.frombuffer(data, np.uint8)[np.where(are_records, starts, 0)]
    for line in np.flatnonzero(are_records & (first <= _SPACES[0])).tolist():
        are_records[line] = bool(data[starts[line] : stops[line]].strip(_SPACES))
    return are_records


def _decode(piece: Piece, block: LineBlock, starts: Int64Array, stops: Int64Array) -> list[Row]:
    lines = [block.data[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    return decode_lines(lines, are_elements=piece.reader == "elements")


def _read_records(
    piece: Piece, block: LineBlock, lines: _Lines, layout: RecordLayout
) -> tuple[Int64Array, list[Record], list[Rejected], Counter[str]]:
    rows = _decode(piece, block, lines.starts, lines.stops)
    kept, records, rejected, unread = parse_rows(layout, rows, lines.numbers.tolist())
    return np.array(kept, np.int64), records, rejected, unread


def _read_columns(
    piece: Piece, block: LineBlock, lines: _Lines, layout: RecordLayout
) -> tuple[Int64Array, LengthColumn | TokenColumns, list[Rejected], Counter[str]]:
    from chunkplan.intake.readers.line_columns import plain_lines  # loads numba, which no other schema needs

    plain = plain_lines(block.data, lines.starts, lines.stops, layout)
    rest = ~plain.taken
    rows = _decode(piece, block, lines.starts[rest], lines.stops[rest])
    return complete(plain, layout, rows, lines.numbers)
