"""JSON lines: pieces are ranges of bytes, and a piece has the lines that begin in its range.

Every line that is not blank is exactly one record, or rejected, or left out by the sample. Memory is bounded: a block
of whole lines is held, or one line of a stated size. A line that is a list of messages is the object that has this list
as its `messages`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, cast

import msgspec
import numpy as np
import pyarrow as pa

from chunkplan.arrays import Int64Array
from chunkplan.intake import pieces
from chunkplan.intake.files import reading
from chunkplan.intake.pieces import LengthColumn, Piece
from chunkplan.intake.readers.rows import BOM, Row, RowBlock, lengths_of, sampled, too_large
from chunkplan.intake.records import JsonObject, RecordError
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.schemas.fields import json_type

_LF = b"\n"
_SPACES = b" \t\r"

#: The key under which the messages of a line are that is nothing but a list of them; one of `_SPEAKERS` is in each.
BARE = "messages"
_SPEAKERS = ("role", "from")

#: The end of a key, and maybe more: text in strings may look like keys. The quote of `\":` is one within a string,
#: unless the backslash is itself behind a backslash.
_KEY_END = re.compile(rb'"(?<![^\\]\\")[ \t\r]*:')

_HINT = "JSONL has one JSON object a line; arrays, and objects over several lines, are read from files named .json"
_HINT_OF_CUT = (
    "the line ends within a value: write it again, or leave it out; objects over several lines are read from files "
    "named .json"
)
_HINT_OF_ELEMENTS = "a .json file is an array of JSON objects, or JSON objects one after another"

_DECODER = msgspec.json.Decoder()

#: A line, decoded: an object, or a list of messages.
_Value = JsonObject | list[JsonObject]

_TOO_DEEP = RecordError("nested too deeply", reason="too-deep", hint="leave this record out")


class LineBlock(NamedTuple):
    """Lines that were read together. `starts` and `stops` [n] are their bytes within `data`, without the LF.

    `data` begins at byte `offset` of the file and has `num_bytes` bytes, unless it is one line that is too large to be
    held: then `data` is empty, and only its size is known.
    """

    data: bytes
    starts: Int64Array
    stops: Int64Array
    offset: int
    num_bytes: int


def cut(path: str, source: int, num_bytes: int) -> Iterator[Piece]:
    """The pieces of a local file."""
    for index, start in enumerate(range(0, num_bytes, pieces.PIECE_BYTES)):
        stop = min(start + pieces.PIECE_BYTES, num_bytes)
        yield Piece(source, index, path, "lines", start, stop, origin=start, num_bytes=stop - start, share=stop - start)


def rows(
    piece: Piece, layout: RecordLayout | None, max_rows: int, max_record_bytes: int, sample: float | None
) -> Iterator[RowBlock]:
    """The objects on lines that are not blank, too large or left out by the sample."""
    row = 0
    for block in line_blocks(piece.path, piece.start, piece.stop, max_line_bytes=max_record_bytes, max_lines=max_rows):
        data, starts, stops = block.data, block.starts, block.stops
        positions = piece.origin + (block.offset - piece.start) + starts
        if positions[0] == 0 and data.startswith(BOM):
            starts = starts.copy()
            starts[0] += len(BOM)
        is_record = stops > starts
        if data:
            first = np.frombuffer(data, np.uint8)[np.where(is_record, starts, 0)]
            for line in np.flatnonzero(is_record & (first <= _SPACES[0])).tolist():
                is_record[line] = bool(data[starts[line] : stops[line]].strip(_SPACES))
        sizes = stops - starts
        is_large, is_chosen = sizes > max_record_bytes, is_record & sampled(positions, sample)
        rejected = [
            too_large(int(sizes[line]), max_record_bytes).of_row(row + line)
            for line in np.flatnonzero(is_chosen & is_large).tolist()
        ]
        is_chosen &= ~is_large
        lines = [data[a:b] for a, b in zip(starts[is_chosen].tolist(), stops[is_chosen].tolist(), strict=True)]
        decoded, unread = (_lengths(lines, layout) if layout and layout.schema == "length" else None) or (
            decode_lines(lines, are_elements=piece.reader == "elements"),
            {},
        )
        numbers = row + np.flatnonzero(is_chosen)
        yield RowBlock(decoded, numbers, int(is_record.sum()), len(starts), block.num_bytes, rejected, unread)
        row += len(starts)


def digest(piece: Piece) -> str:
    """SHA-256 of the bytes of the lines."""
    hasher = hashlib.sha256()
    with reading(piece.path), Path(piece.path).open("rb") as file:
        at, stop = _first_line(file, piece.start, piece.stop), _first_line(file, piece.stop, sys.maxsize)
        file.seek(at)
        while at < stop and (data := file.read(min(pieces.BLOCK_BYTES, stop - at))):
            hasher.update(data)
            at += len(data)
    return hasher.hexdigest()


def num_rows(piece: Piece) -> int:
    """Number of lines of a piece, blank ones included."""
    return sum(len(block.starts) for block in _sizes(piece))


def alone(piece: Piece, number: int, folder: Path) -> Piece:
    """The piece of one line; nothing is written."""
    for block in _sizes(piece):
        if number < len(block.starts):
            start, stop = (block.offset + int(ends[number]) for ends in (block.starts, block.stops))
            origin = piece.origin + start - piece.start
            return replace(piece, start=start, stop=max(stop, start + 1), origin=origin, num_bytes=stop - start)
        number -= len(block.starts)
    raise AssertionError("the piece has fewer lines")


def _sizes(piece: Piece) -> Iterator[LineBlock]:
    """Its lines, of which long ones are not held."""
    return line_blocks(piece.path, piece.start, piece.stop, max_line_bytes=0, max_lines=sys.maxsize)


def line_blocks(path: str, start: int, stop: int, *, max_line_bytes: int, max_lines: int) -> Iterator[LineBlock]:
    """The lines of a local file that begin in its bytes [start, stop), in blocks of at most `max_lines`.

    Only LF ends a line, and the end of the file. A line of more than `max_line_bytes` that is longer than a block is
    not held in memory. Raises UsageError: the file cannot be read.
    """
    with reading(path), Path(path).open("rb") as file:
        at = _first_line(file, start, stop)
        while at < stop:
            file.seek(at)
            data = file.read(pieces.BLOCK_BYTES)
            if not data:
                return
            # Whole lines that begin before `stop`; the end of the file ends one as well.
            num_bytes = data.find(_LF, stop - at - 1) + 1
            num_bytes = num_bytes or (len(data) if len(data) < pieces.BLOCK_BYTES else data.rfind(_LF) + 1)
            if num_bytes:
                yield from _split(data[:num_bytes], at, max_lines)
            else:
                num_bytes, ending = _long_line(file, at + len(data), len(data))
                if num_bytes - ending > max_line_bytes:
                    yield LineBlock(b"", np.zeros(1, np.int64), np.array([num_bytes - ending]), at, num_bytes)
                else:
                    del data
                    file.seek(at)
                    yield from _split(file.read(num_bytes), at, max_lines)
            at += num_bytes


def _first_line(file: BinaryIO, start: int, stop: int) -> int:
    """Offset of the first line that begins at or after `start`; an offset >= `stop` if none begins before `stop`."""
    at = max(start - 1, 0)
    file.seek(at)
    while start and at < stop and (data := file.read(pieces.BLOCK_BYTES)):
        found = data.find(_LF)
        if found >= 0:
            return at + found + 1
        at += len(data)
    return at


def _long_line(file: BinaryIO, at: int, num_bytes: int) -> tuple[int, int]:
    """The bytes of a line of which `num_bytes` are read and end at `at`, and whether (0 or 1) an LF is among them."""
    file.seek(at)
    while data := file.read(pieces.BLOCK_BYTES):
        found = data.find(_LF)
        if found >= 0:
            return num_bytes + found + 1, 1
        num_bytes += len(data)
    return num_bytes, 0


def _split(data: bytes, offset: int, max_lines: int) -> Iterator[LineBlock]:
    stops = np.flatnonzero(np.frombuffer(data, np.uint8) == _LF[0])
    if not data.endswith(_LF):
        stops = np.append(stops, len(data))
    starts = np.concatenate([[0], stops[:-1] + 1])
    for line in range(0, len(starts), min(max_lines, len(starts))):
        some = slice(line, line + max_lines)
        start, stop = int(starts[line]), min(int(stops[some][-1]) + 1, len(data))
        yield LineBlock(data[start:stop], starts[some] - start, stops[some] - start, offset + start, stop - start)


def _lengths(lines: Sequence[bytes], layout: RecordLayout) -> tuple[LengthColumn, dict[str, int]] | None:
    """The lengths on lines that pyarrow reads as `decode_lines` would, as `lengths_of` has them; None for others."""
    from pyarrow import json as arrow_json

    block = _LF.join(lines)
    if not block or b"\\" in block or not _are_objects(lines, block):
        return None
    try:
        block.decode()
        table = arrow_json.read_json(
            pa.py_buffer(block),
            arrow_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            arrow_json.ParseOptions(explicit_schema=pa.schema([(layout.columns["length"], pa.int64())])),
        )
    except (pa.ArrowException, UnicodeDecodeError):
        return None
    # Fractions, and what is in lists and objects, it may take where it is none of JSON's.
    if len(table) != len(lines) or any(pa.types.is_floating(t) or pa.types.is_nested(t) for t in table.schema.types):
        return None
    return lengths_of(table.combine_chunks().to_batches()[0], layout)


def _are_objects(lines: Sequence[bytes], block: bytes) -> bool:
    """True if every line begins with `{` and ends with `}`.

    Parsers of several lines take an LF for any other space: a line may hold two values, and a value several lines. A
    value that began on an earlier line cannot go on with `{` behind a `}`, so these lines hold one value each at least.
    """
    if block[:1] + block[-1:] == b"{}" and block.count(b"\n{") == block.count(b"}\n") == len(lines) - 1:
        return True
    return all(line.startswith(b"{") and line.rstrip().endswith(b"}") for line in lines)


def decode_lines(lines: Sequence[bytes], *, are_elements: bool = False) -> list[Row]:
    """The object on every line, or its error. Lines have no LF in them and are not blank.

    `are_elements`: they are elements of an array, or objects over several lines, and no lines of the file.
    """
    block = _LF.join(lines)
    if (rows := _decode_block(lines, block)) is not None and _most_keys(block) == _num_keys(rows, block):
        return rows
    found = [_without_duplicates(line, _decode_line(line, are_elements)) for line in lines]
    return [row if isinstance(row, (dict, RecordError)) else {BARE: row} for row in found]


def _decode_block(lines: Sequence[bytes], block: bytes) -> list[Row] | None:
    """The objects on all lines together, or None where one of them is none."""
    try:
        records: list[Row] = _DECODER.decode_lines(block)
    except (ValueError, RecursionError):
        return None
    return records if len(records) == len(lines) and _are_objects(lines, block) else None


def _decode_line(line: bytes, is_element: bool) -> _Value | RecordError:
    hint = _HINT_OF_ELEMENTS if is_element else _HINT
    try:
        record = _DECODER.decode(line)
    except RecursionError:
        return _TOO_DEEP
    except ValueError as error:
        return _not_json(line, str(error), _HINT_OF_CUT if not is_element and "truncated" in str(error) else hint)
    if isinstance(record, dict) or _are_messages(record):
        return cast(_Value, record)
    expected = "a JSON object as the element of the array" if is_element else "one JSON object a line"
    return RecordError(f"found {json_type(record)}, expected {expected}", reason="not-an-object", hint=hint)


def _are_messages(value: object) -> bool:
    """True for a non-empty list of objects that all name a speaker."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(entry, dict) and any(isinstance(entry.get(key), str) for key in _SPEAKERS) for entry in value
        )
    )


def _not_json(line: bytes, message: str, hint: str) -> RecordError:
    """Explain why the decoder refuses a line with `message`: its encoding, or values that only other parsers accept."""
    try:
        text = line.decode()
    except UnicodeDecodeError as wrong:
        message = f"not UTF-8: byte 0x{line[wrong.start]:02x} at column {wrong.start + 1} ({wrong.reason})"
        return RecordError(message, reason="not-utf8", hint="convert the file to UTF-8")
    try:
        value = json.loads(text, parse_constant=_refuse, parse_int=len)
        json.dumps(value, ensure_ascii=False).encode()
        return RecordError("a number beyond 64 bits", reason="not-json", hint="write it as a string, or leave it out")
    except UnicodeEncodeError as error:
        message = f"a lone surrogate, \\u{ord(error.object[error.start]):04x}, in a string"
        return RecordError(message, reason="not-json", hint="it is half of a character: fix the text")
    except _NoNumberError as error:
        message = f"not JSON: {error} is no number there, though Python's `json.dumps` writes it"
        return RecordError(message, reason="not-json", hint="write a number or null; `allow_nan=False` finds where")
    except (ValueError, RecursionError):
        pass
    if line.startswith(BOM):
        message = "a byte order mark, which only the first line may have"
        return RecordError(message, reason="not-json", hint="leave it out: it is there where files were joined")
    if b"\0" in line:
        message = f"a zero byte at column {line.index(0) + 1}, as UTF-16 and UTF-32 have them"
        return RecordError(message, reason="not-utf8", hint="convert the file to UTF-8")
    return RecordError(f"not JSON: {message}", reason="not-json", hint=hint)


class _NoNumberError(Exception):
    """NaN, Infinity or -Infinity stands where JSON has a number."""


def _refuse(name: str) -> NoReturn:
    raise _NoNumberError(name)


def _without_duplicates(line: bytes, row: _Value | RecordError) -> _Value | RecordError:
    """`row`, but the error of a line with a key twice in one object: the decoder keeps the last of them silently."""
    if isinstance(row, RecordError) or len(_KEY_END.findall(line)) == _num_keys([row], line):
        return row
    try:
        json.loads(line.decode(), object_pairs_hook=_distinct, parse_int=len, parse_float=len)
    except KeyError as error:
        message = f"the key {json.dumps(error.args[0])} is there twice in one object"
        return RecordError(message, reason="duplicate-keys", hint="leave one of the two out")
    except RecursionError:
        return _TOO_DEEP
    return row


def _distinct(pairs: list[tuple[str, Any]]) -> None:
    """Raises KeyError for a key that is there twice."""
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise KeyError(key)
        seen.add(key)


def _most_keys(text: bytes) -> int:
    """Upper bound of the number of keys in JSON lines: text in strings may look like keys. Faster than `_KEY_END`."""
    padded = np.frombuffer(b"   " + text, np.uint8)
    colons = np.flatnonzero(padded == ord(":"))
    first, second, third = (padded[colons - distance] for distance in (1, 2, 3))
    are_ends = (first == ord('"')) & ((second != ord("\\")) | (third == ord("\\")))
    are_ends |= (first <= ord(" ")) & ((second == ord('"')) | (second <= ord(" ")))
    return int(are_ends.sum())


def _num_keys(records: Sequence[Row | _Value], text: bytes) -> int:
    """Number of keys of all objects in `records`, nested ones included; `records` were decoded from `text`."""
    if text.count(b"{") == len(records):  # none of them has another in it
        return sum(map(len, records))  # type: ignore[arg-type]
    num_keys = 0
    values: list[Any] = list(records)
    for value in values:  # grows on the way
        if type(value) is dict:
            num_keys += len(value)
            values.extend(inner for inner in value.values() if type(inner) is dict or type(inner) is list)
        elif not {dict, list}.isdisjoint(map(type, value)):
            values.extend(inner for inner in value if type(inner) is dict or type(inner) is list)
    return num_keys
