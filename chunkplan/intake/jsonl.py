"""Reads JSON lines as bytes: one line in memory, every error with its file and line, the file's SHA-256 on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from chunkplan.errors import DataError, UsageError

_HINT = "JSONL has one JSON object a line; an array is not read"

_BOM = b"\xef\xbb\xbf"


class JsonLines:
    """The records of one JSONL file, read once, in order.

    Only LF ends a line (CR before it is whitespace), so U+2028 and U+0085 inside a string are what JSON says they are:
    characters. Blank lines are no records. After the last record `num_bytes` and `content_hash` describe the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hasher = hashlib.sha256()
        self.num_bytes = 0

    @property
    def content_hash(self) -> str:
        """SHA-256 of the bytes read so far."""
        return self._hasher.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line number from 1, record) of every line that is not blank.

        Raises:
            UsageError: the file cannot be opened.
            DataError: a line is not UTF-8, not JSON, or not an object.
        """
        decoder = msgspec.json.Decoder()
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    self._hasher.update(line)
                    self.num_bytes += len(line)
                    if number == 1:
                        line = line.removeprefix(_BOM)
                    if not line.isspace() and line:
                        yield number, self._decode(decoder, line, number)
        except OSError as error:
            raise UsageError(
                f"cannot read {self._path}: {error.strerror}", hint="check the path and its permissions"
            ) from error

    def _decode(self, decoder: msgspec.json.Decoder[Any], line: bytes, number: int) -> dict[str, Any]:
        where = f"{self._path}:{number}"
        try:
            record = decoder.decode(line)
        except RecursionError as error:
            raise DataError("nested too deeply", where=where, hint="leave this record out") from error
        except ValueError as error:
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as wrong:
                message = f"not UTF-8: byte 0x{line[wrong.start]:02x} at column {wrong.start + 1} ({wrong.reason})"
                raise DataError(message, where=where, hint="convert the file to UTF-8") from error
            raise DataError(f"not JSON: {error}", where=where, hint=_HINT) from error
        if not isinstance(record, dict):
            raise DataError(f"found {json_type(record)}, expected one JSON object a line", where=where, hint=_HINT)
        return record


def json_type(value: object) -> str:
    """The JSON name of a decoded value's type, with its article."""
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names[type(value)]
