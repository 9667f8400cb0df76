"""Rows of CSV, and texts between separators, as JSON lines: an object for each, all of whose values are texts.

What is a number or a truth value in a table of texts is known by its column alone: lengths are numbers, and labels of
answers true or false. An empty cell is an empty text. Semicolons separate the cells of CSV whose first line has some,
and no comma.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec

from chunkplan.intake.readers.rows import BOM, unreadable
from chunkplan.intake.schemas.table import SCHEMAS
from chunkplan.intake.sources import SourceFile

#: The largest cell; what is larger is a quote that nothing ends.
_CELL_BYTES = 1 << 27

_DELIMITERS = {"csv": ",", "tsv": "\t"}
_NUMBERS = SCHEMAS["length"].required["length"]
_LABELS = SCHEMAS["instruction"].optional["label"]
_TRUTHS = {"true": True, "false": False}

#: Characters that JSON escapes within a text.
_ESCAPED = re.compile(rb'[\x00-\x1f"\\]')


def rows_of_csv(data: Iterator[bytes], file: SourceFile) -> Iterator[bytes]:
    """The rows of CSV or TSV, whose first line names the columns, each as an object on a line; blank ones as blanks.

    Raises RecordError: unreadable: no two columns may have one name, every row has to have all cells, and all is UTF-8;
    or as `data`.
    """
    csv.field_size_limit(_CELL_BYTES)
    text = io.TextIOWrapper(io.BufferedReader(_Stream(data)), encoding="utf-8-sig", newline="")
    rows = csv.reader(text, delimiter=_DELIMITERS[file.kind], strict=True)
    try:
        first = text.readline()
        sign = ";" if file.kind == "csv" and ";" in first and "," not in first else _DELIMITERS[file.kind]
        rows = csv.reader(chain([first], text), delimiter=sign, strict=True)
        names = next(rows, [])
        if not any(names) or len({*names}) < len(names):
            what = "several columns of the same name" if any(names) else "its first line names no column"
            raise unreadable(what, file.path, hint="name each column in the first line")
        for row in rows:
            if row and len(row) != len(names):
                message = f"line {rows.line_num:,} has {len(row)} cells, and the first line names {len(names)} columns"
                raise unreadable(
                    message, file.path, hint=f"fix the line; a {file.kind} quotes cells with the delimiter"
                )
            found = {name: _value(name, cell) for name, cell in zip(names, row, strict=True)} if row else None
            yield msgspec.json.encode(found) + b"\n" if found else b"\n"
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{error.object[error.start]:02x} ({error.reason}) near line {rows.line_num + 1:,}"
        raise unreadable(message, file.path, hint="convert the file to UTF-8") from error
    except csv.Error as error:
        message = f"not {file.kind}: {error} at line {rows.line_num:,}"
        raise unreadable(
            message, file.path, hint='a cell that begins with " ends with one, and has "" within'
        ) from error


def _value(name: str, cell: str) -> Any:
    if name in _NUMBERS and cell.isascii() and cell.isdigit():
        return int(cell)
    return _TRUTHS.get(cell.lower(), cell) if name in _LABELS else cell


class _Stream(io.RawIOBase):
    """A file of the bytes of an iterator."""

    def __init__(self, data: Iterator[bytes]) -> None:
        self._data = data
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest and (block := next(self._data, None)) is not None:
            self._rest = memoryview(block)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def split_texts(data: Iterator[bytes], separator: str) -> Iterator[bytes]:
    """The texts between separators, or the lines where it is "line", each as a record on a line, in parts.

    Blank ones are blank lines. Bytes that are no UTF-8 are for who reads the lines.
    """
    pattern = re.compile(rb"\r?\n" if separator == "line" else re.escape(separator.encode()))
    longest = 2 if separator == "line" else len(separator.encode())
    held, is_open = b"", False  # `is_open`: something of the text at hand was put out
    for block in chain([next(data, b"").removeprefix(BOM)], data, [None]):
        *whole, rest = pattern.split(held + (block or b""))
        num_sure = len(rest) if block is None else len(rest) - longest + 1  # what is behind may begin a separator
        for part in whole:
            yield from _text(part, is_open=is_open, is_whole=True)
            is_open = False
        held = rest
        if (is_open or rest[: max(num_sure, 0)].strip()) and num_sure > 0:
            yield from _text(rest[:num_sure], is_open=is_open, is_whole=False)
            is_open, held = True, rest[num_sure:]
    if held or is_open:
        yield from _text(held, is_open=is_open, is_whole=True)


def _text(part: bytes, *, is_open: bool, is_whole: bool) -> Iterator[bytes]:
    """A text, or a part of one, as a record on a line."""
    if is_open or part.strip():
        yield (b"" if is_open else b'{"text":"') + _ESCAPED.sub(_escape, part) + (b'"}' if is_whole else b"")
    if is_whole:
        yield b"\n"


def _escape(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % found[0][0]
