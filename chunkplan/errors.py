"""The errors a user can meet. Each knows its exit code, where it happened and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Where any command may have taken the value; the command line names its own.
HELP_HINT = "the command's --help shows what it takes"


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
        """Where and what in one line, without the `lines` below it."""
        return f"{self.where}: {self.message}" if self.where else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors come back from worker processes as they were."""
        return _restore, (type(self), self.__dict__)


def _restore(kind: type[ChunkplanError], attributes: dict[str, Any]) -> ChunkplanError:
    error = kind.__new__(kind, attributes["message"])
    error.__dict__.update(attributes)
    return error


class UsageError(ChunkplanError):
    """What was asked for cannot be done: a bad option, a path that is not there, an extra not installed."""

    exit_code = 2


class DataError(ChunkplanError):
    """A file is not what it should be."""

    exit_code = 3
