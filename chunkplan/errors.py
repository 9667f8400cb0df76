"""The errors a user can meet. Each knows its exit code, where it happened and what to do about it.

And text from data, made safe to be shown: nothing in it moves a cursor, hides, or changes the direction of the rest.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

#: Where any command may have taken the value; the command line names its own.
HELP_HINT = "the command's --help shows what it takes"

#: Controls, invisible characters and those that change direction, odd breaks of lines, halves of characters.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")

#: What moves the cursor, sets colours or asks the terminal for something: all controls but line ends and tabs; and what
#: turns the direction of what follows.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class ChunkplanError(Exception):
    """An error with a place and a hint. `exit_code` 1: our fault.

    `where` names the place (`file:line`, `step 3, rank 0, chunk 2`); `hint`, which every error has, the next thing to
    try. `lines` has one line for each of several things that are wrong.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str, where: str | None = None, lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.lines = tuple(lines)
        self.where = where
        self.hint = hint
        self.add_note(f"hint: {hint}")  # for who calls from Python and sees a traceback

    def __str__(self) -> str:
        return "\n  ".join([self.headline, *self.lines])

    @property
    def headline(self) -> str:
        """Place and message in one line, without the `lines` below it."""
        return f"{self.where}: {self.message}" if self.where else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors come back from worker processes as they were."""
        return _restore, (type(self), self.__dict__)


def _restore(kind: type[ChunkplanError], attributes: dict[str, Any]) -> ChunkplanError:
    error = kind.__new__(kind, attributes["message"])
    error.__dict__.update(attributes)
    return error


class UsageError(ChunkplanError):
    """A request that cannot be done: a bad option, a path that does not exist, an extra not installed."""

    exit_code = 2


class DataError(ChunkplanError):
    """A file is not what it should be."""

    exit_code = 3


def harmless(text: str) -> str:
    """Return `text` with a question mark for each character that would steer a terminal. Its lines stay."""
    return _STEERING.sub("?", text)


def one_line(text: str) -> str:
    """Return `harmless` text on one line: a name in it cannot begin a line that looks like one of ours."""
    return harmless(text).replace("\n", "?")


def visible(text: str, *, marks: tuple[str, ...] = ()) -> str:
    """Return `text` with symbols for control characters, and its lines below each other.

    Other hidden characters, and `marks`, become codes such as `\\u27e6`.
    """
    return text.translate({ord(letter): _symbol(letter) for letter in set(text) if letter in marks or _is_odd(letter)})


def _is_odd(letter: str) -> bool:
    return unicodedata.category(letter) in _HIDDEN


def _symbol(letter: str) -> str:
    code = ord(letter)
    if code < 0x20:
        return chr(0x2400 + code) + ("\n" if letter == "\n" else "")  # the block of control pictures
    return "\u2421" if code == 0x7F else letter.encode("ascii", "backslashreplace").decode()
