"""JSON lines -> objects: the fast way where all is well, line by line with precise reasons where it is not.

A line that is a list of messages is the object that has this list as its `messages`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import msgspec
import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.intake.readers.parsing import Row
from chunkplan.intake.records import JsonObject
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.schemas.fields import json_type

_HINT = "JSONL has one JSON object a line; arrays, and objects over several lines, are read from files named .json"
_HINT_OF_CUT = (
    "the line ends within a value: write it again, or leave it out; objects over several lines are read from files "
    "named .json"
)
_HINT_OF_ELEMENTS = "a .json file is an array of JSON objects, or JSON objects one after another"

_BOM = b"\xef\xbb\xbf"

#: What the decoder says of a line that ends within its value.
_ENDS_EARLY = "Input data was truncated"

#: The key under which the messages of a line are that is nothing but a list of them.
BARE = "messages"

#: One of these is in every message.
_SPEAKERS = ("role", "from")

_DECODER = msgspec.json.Decoder()

#: A line, decoded: an object, or a list of messages.
_Value = JsonObject | list[JsonObject]

_TOO_DEEP = RecordError("nested too deeply", reason="too-deep", hint="leave this record out")

#: How many spaces before a colon are looked at; if there are more, there may be a key before them.
_FAR = 64


def decode_lines(lines: Sequence[bytes], *, are_elements: bool = False) -> list[Row]:
    """The object on every line, or what is wrong with it. Lines have no LF in them and are not blank.

    `are_elements` says that the file has no such lines: they are elements of an array, or objects over several lines.
    """
    block = b"\n".join(lines)
    rows = _check_keys(
        lines, block, _decode_block(lines, block) or [_decode_line(line, are_elements) for line in lines]
    )
    return [row if isinstance(row, (dict, RecordError)) else {BARE: row} for row in rows]


def _decode_block(lines: Sequence[bytes], block: bytes) -> list[_Value | RecordError] | None:
    """The objects on all lines together, or None where one of them is none."""
    try:
        records: list[_Value | RecordError] = _DECODER.decode_lines(block)
    except (ValueError, RecursionError):
        return None
    # `decode_lines` takes an LF for any other space: a line may hold two values, and a value several lines. A value
    # that began on an earlier line cannot go on with `{` behind a `}`, so these lines hold one value each at least.
    are_objects = all(line.startswith(b"{") and line.rstrip().endswith(b"}") for line in lines)
    return records if are_objects and len(records) == len(lines) else None


def _decode_line(line: bytes, is_element: bool) -> _Value | RecordError:
    hint = _HINT_OF_ELEMENTS if is_element else _HINT
    try:
        record = _DECODER.decode(line)
    except RecursionError:
        return _TOO_DEEP
    except ValueError as error:
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as wrong:
            message = f"not UTF-8: byte 0x{line[wrong.start]:02x} at column {wrong.start + 1} ({wrong.reason})"
            return RecordError(message, reason="not-utf8", hint="convert the file to UTF-8")
        if not is_element and _ENDS_EARLY in str(error):
            hint = _HINT_OF_CUT
        not_json = RecordError(f"not JSON: {error}", reason="not-json", hint=hint)
        return _not_taken(line) or _not_our_text(line) or not_json
    if not isinstance(record, dict) and not _are_messages(record):
        expected = "a JSON object as the element of the array" if is_element else "one JSON object a line"
        message = f"found {json_type(record)}, expected {expected}"
        return RecordError(message, reason="not-an-object", hint=hint)
    return cast(_Value, record)


def _are_messages(value: object) -> bool:
    """Whether it is a list of objects that all say who speaks."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(entry, dict) and any(isinstance(entry.get(key), str) for key in _SPEAKERS) for entry in value
        )
    )


def _not_taken(line: bytes) -> RecordError | None:
    """Why the decoder refuses a line that other parsers take for JSON; None if they refuse it too."""
    try:
        value = json.loads(line.decode(), parse_constant=_refuse, parse_int=len)
    except (ValueError, RecursionError):
        return None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(error.object[error.start]):04x}"
        message, hint = f"a lone surrogate, {surrogate}, in a string", "it is half of a character: fix the text"
        return RecordError(message, reason="not-json", hint=hint)
    return RecordError("a number beyond 64 bits", reason="not-json", hint="write it as a string, or leave it out")


def _not_our_text(line: bytes) -> RecordError | None:
    """What is wrong with a line of a file that was joined from several, or is in another encoding."""
    if line.startswith(_BOM):
        message = "a byte order mark, which only the first line may have"
        return RecordError(message, reason="not-json", hint="leave it out: it is there where files were joined")
    if b"\0" in line:
        message = f"a zero byte at column {line.index(0) + 1}, as UTF-16 and UTF-32 have them"
        return RecordError(message, reason="not-utf8", hint="convert the file to UTF-8")
    return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _check_keys(lines: Sequence[bytes], block: bytes, rows: list[_Value | RecordError]) -> list[_Value | RecordError]:
    """`rows`, but errors for lines that have a key twice in one object: the decoder keeps the last of them silently."""
    ends = _ends_of_keys(block)
    records = [row for row in rows if not isinstance(row, RecordError)]
    if len(records) == len(rows) and len(ends) == _num_keys(records):
        return rows
    starts = np.cumsum([0, *(len(line) + 1 for line in lines)])
    most = np.bincount(np.searchsorted(starts, ends, side="right") - 1, minlength=len(lines)).tolist()
    return [
        _find_duplicate(line) or row if not isinstance(row, RecordError) and num_keys != _num_keys([row]) else row
        for line, row, num_keys in zip(lines, rows, most, strict=True)
    ]


def _find_duplicate(line: bytes) -> RecordError | None:
    try:
        json.loads(line.decode(), object_pairs_hook=_distinct, parse_int=len, parse_float=len)
    except _DuplicateKeyError as error:
        return RecordError(
            f"the key {json.dumps(error.key)} is there twice in one object",
            reason="duplicate-keys",
            hint="leave one of the two out",
        )
    except RecursionError:
        return _TOO_DEEP
    return None


class _DuplicateKeyError(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _distinct(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise _DuplicateKeyError(key)
        seen.add(key)


def _ends_of_keys(text: bytes) -> Int64Array:
    """Where the colons behind keys are in JSON lines, and maybe more: text in strings may look like keys.

    A key ends with a quote, maybe spaces, and a colon. The quote of `\\":` is one within a string, unless the backslash
    is itself behind a backslash.
    """
    padded = np.frombuffer(b"   " + text, np.uint8)
    colons = np.flatnonzero(padded == ord(":"))
    before, second, third = (padded[colons - distance] for distance in (1, 2, 3))
    are_ends = (before == ord('"')) & ((second != ord("\\")) | (third == ord("\\")))
    for index in np.flatnonzero((before <= ord(" ")) & (colons > 3)).tolist():
        at = int(colons[index]) - 3
        behind = text[max(at - _FAR, 0) : at].rstrip(b" \t\r")
        are_ends[index] = not behind or behind.endswith(b'"')
    found: Int64Array = colons[are_ends] - 3
    return found


def _num_keys(records: Sequence[_Value]) -> int:
    """How many keys all objects in `records` have together."""
    num_keys = 0
    values: list[Any] = list(records)
    for value in values:  # grows on the way
        if type(value) is dict:
            num_keys += len(value)
            values.extend(inner for inner in value.values() if type(inner) is dict or type(inner) is list)
        else:
            values.extend(inner for inner in value if type(inner) is dict or type(inner) is list)
    return num_keys
