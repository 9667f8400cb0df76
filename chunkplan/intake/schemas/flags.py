"""Hints with options to be pasted, which can be said of one source of several as well as of all."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from chunkplan.errors import DataError

#: What stands before a line to be pasted, which a hint ends with.
TRY = "try this: "

#: What stands before flags one of which is to be chosen.
CHOOSE = "say which: "


class Flag(NamedTuple):
    """An option and its value: `--column` with ROLE=KEY, or `--format` with NAME."""

    option: str
    value: str

    def typed(self, source: str | None) -> str:
        """The words to paste into a shell, for the sources that `source` names, or for all."""
        sign = ":" if self.option == "--column" else "="
        return f"{self.option} {shlex.quote(self.value if source is None else f'{source}{sign}{self.value}')}"


def column_flags(keys: Mapping[str, str]) -> list[Flag]:
    """The options that name the keys of these roles."""
    return [Flag("--column", f"{role}={key}") for role, key in keys.items()]


def line_of(flags: Sequence[Flag], source: str | None = None) -> str:
    """All of `flags`, as they are typed for the sources that `source` names, or for all."""
    return " ".join(flag.typed(source) for flag in flags)


def spaced(flags: Sequence[Flag]) -> list[str | Flag]:
    """`flags` as parts of a hint, with spaces between."""
    return [part for flag in flags for part in (" ", flag)][1:]


class LayoutError(DataError):
    """How the records of a source are laid out is not known; `words` are the parts of the hint, flags among them.

    `missing` are roles for which the user has named keys that no record has.
    """

    def __init__(
        self, message: str, words: Sequence[str | Flag], *, where: str | None = None, missing: Sequence[str] = ()
    ) -> None:
        self.words = tuple(words)
        self.missing = tuple(missing)
        super().__init__(message, where=where, hint=self.hint_for(None))

    def hint_for(self, source: str | None) -> str:
        """The hint, where its flags are for the sources that `source` names, or for all."""
        return "".join(word.typed(source) if isinstance(word, Flag) else word for word in self.words)

    @property
    def line(self) -> tuple[Flag, ...]:
        """The flags that have the source read, all of which are to be pasted; none where they are not known."""
        return tuple(word for word in self.words if isinstance(word, Flag)) if TRY in self.words else ()

    @property
    def is_definite(self) -> bool:
        """Whether the hint has flags that work as they are: to be pasted, or to choose from."""
        return TRY in self.words or CHOOSE in self.words
