"""A JSON array of any size -> its elements, or objects one after another, one a line and in bounded memory.

An element may be larger than a block.

What is in an element is not looked into, only where it ends: whether it is JSON is for who reads the lines.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.intake.readers.stream import unreadable
from chunkplan.intake.rejection import RecordError

_QUOTE, _COMMA = ord('"'), ord(",")

_OPENING, _CLOSING = b"[{", b"]}"

#: How much deeper each byte leads, and which bytes say where elements end.
_STEP = np.zeros(256, np.int64)
_STEP[list(_OPENING)], _STEP[list(_CLOSING)] = 1, -1
_IS_MARK = _STEP != 0
_IS_MARK[_COMMA] = True

_SPACES = b" \t\r\n"

#: A raw line end within a string is an error, and as CR it stays one; anywhere else both are spaces.
_LINE_END = bytes.maketrans(b"\n", b"\r")


def elements(data: Iterator[bytes], path: str) -> Iterator[bytes]:
    """The elements of the array in `data`, which begins with its `[`: each on a line that ends with LF, in parts.

    Raises:
        RecordError: unreadable: no `]`, something behind it, an element that is missing, or a comma; or as `data`.
    """
    array = _Array(path)
    for block in data:
        lines: list[bytes] = []
        try:
            array.take(block, lines)
        except RecordError:
            yield b"".join(lines)
            raise
        yield b"".join(lines)
    array.check_end()


def objects(data: Iterator[bytes], path: str) -> Iterator[bytes]:
    """The objects in `data`, each over as many lines as it likes: each on a line that ends with LF, in parts.

    Raises:
        RecordError: unreadable: something is between them, or the last has no end; or as `data`.
    """
    marks = _Marks(0)
    num_done, is_open = 0, False
    for block in data:
        lines: list[bytes] = []
        at = 0
        for position in [*marks.find(block).tolist(), len(block)]:
            mark = block[position : position + 1]
            if is_open:
                lines.append(block[at : position + len(mark)].translate(_LINE_END))
                if mark and mark != b"}":
                    yield b"".join(lines)
                    raise _misplaced(f"expected `}}` at the end of object {num_done}", mark[0], path, "objects")
                is_open = not mark
                if mark:
                    lines.append(b"\n")
                    num_done += 1
                    at = position + 1
            else:
                found = block[at:position].strip(_SPACES) or (b"" if mark == b"{" else mark)
                if found:
                    yield b"".join(lines)
                    raise _misplaced(f"expected `{{` of object {num_done}", found[0], path, "objects")
                is_open, at = bool(mark), position
        yield b"".join(lines)
    if is_open:
        raise _misplaced(f"expected `}}` at the end of object {num_done}", None, path, "objects")


def _misplaced(message: str, found: int | None, path: str, counted: str) -> RecordError:
    what = "the end of the file" if found is None else f"`{chr(found)}`" if found < 0x80 else f"byte {found:#04x}"
    return unreadable(
        f"{message}, found {what}; {counted} are counted from 0",
        path,
        hint="fix the file, or write it as JSONL: one object a line",
    )


class _Array:
    """A position in an array that is read block by block."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._marks = _Marks(1)
        self._depth = 0
        self._num_done = 0
        self._has_ended = False
        self._has_begun = False  # the element: there is something of it
        self._is_whole = False  # its brackets are closed again
        self._is_due = False  # a comma was before it

    def take(self, block: bytes, lines: list[bytes]) -> None:
        """Add to `lines` the elements that are in `block`, whole or in part."""
        at = 0
        for position in self._marks.find(block).tolist():
            mark = block[position]
            if self._has_ended:
                break
            if mark in _OPENING:
                if self._is_whole:
                    raise self._error(f"expected `,` or `]` behind element {self._num_done}", mark)
                self._depth += 1
                at = position + 1 if self._depth == 1 else at
            elif mark == _COMMA:
                self._add(block[at:position], lines)
                self._end_element(mark, lines)
                self._is_due = True
                at = position + 1
            else:
                self._depth -= 1
                self._is_whole = self._depth == 1
                if not self._depth:
                    self._add(block[at:position], lines)
                    if self._has_begun or self._is_due:
                        self._end_element(mark, lines)
                    if mark != ord("]"):
                        raise self._error("expected `,` or `]`", mark)
                    self._has_ended = True
                    at = position + 1
        if not self._has_ended:
            self._add(block[at:], lines)
        elif behind := block[at:].strip(_SPACES):
            raise self._error("expected nothing behind the array", behind[0])

    def check_end(self) -> None:
        """Raises RecordError where the array goes on, or there was nothing in it."""
        if not self._has_ended:
            raise self._error("expected `,` or `]`", None)
        if not self._num_done:
            raise unreadable("an array without elements", self._path, hint="leave the file out")

    def _add(self, text: bytes, lines: list[bytes]) -> None:
        if not self._has_begun:
            text = text.lstrip(_SPACES)
        if text:
            self._has_begun = True
            lines.append(text.translate(_LINE_END))

    def _end_element(self, found: int, lines: list[bytes]) -> None:
        if not self._has_begun:
            raise self._error(f"expected element {self._num_done}", found)
        lines.append(b"\n")
        self._num_done += 1
        self._has_begun = self._is_whole = self._is_due = False

    def _error(self, message: str, found: int | None) -> RecordError:
        return _misplaced(message, found, self._path, "elements")


class _Marks:
    """Finds brackets, and commas between them, that are not in strings and down to some depth."""

    def __init__(self, deepest: int) -> None:
        self._deepest = deepest
        self._depth = 0
        self._in_string = 0
        self._is_escaped = False  # the first byte of the next block

    def find(self, block: bytes) -> Int64Array:
        """Where in `block`, which follows the last, brackets up to the depth are that begin or end there, and commas.

        Of an array, 1 is the depth of its elements; of objects one after another, 0.
        """
        if self._is_escaped and block[:1] in (b'"', b"\\"):  # a bracket behind a backslash is one all the same
            block = b"_" + block[1:]
        if b"\\" in block:  # blank out what is escaped: of a run of backslashes, pairs from its begin
            block = block.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        self._is_escaped = block.endswith(b"\\")
        text = np.frombuffer(block, np.uint8)
        quotes = np.flatnonzero(text == _QUOTE)
        marks = np.flatnonzero(_IS_MARK[text])
        marks = marks[(np.searchsorted(quotes, marks) + self._in_string) % 2 == 0]
        steps = _STEP[text[marks]]
        after = self._depth + np.cumsum(steps)
        self._depth += int(steps.sum())
        self._in_string = (self._in_string + len(quotes)) % 2
        found: Int64Array = marks[np.minimum(after, after - steps) <= self._deepest]
        return found
