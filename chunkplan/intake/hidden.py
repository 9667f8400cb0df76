"""What Spark and Hive leave beside data, by its name: nothing below it is data unless it is named itself."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from chunkplan.intake.files import name_of


def is_hidden(name: str) -> bool:
    """Whether nothing is read in what has this name: `_SUCCESS`, `_temporary`; a partition (`_year=2026`) is."""
    return name.startswith("_") and "=" not in name


def outermost_hidden(path: str, pattern: str, named: int) -> str | None:
    """What is hidden of a `path` that a pattern matches, less what a part of the pattern with a leading `_` stands for.

    The first `named` characters of both are the same, and name themselves what they name.
    """
    asked = [part for part in pattern[named:].split("/") if is_hidden(part)]
    parts = path[named:].split("/")
    for place, part in enumerate(parts):
        if is_hidden(part) and not any(fnmatchcase(part, each) for each in asked):
            return path[:named] + "/".join(parts[: place + 1])
    return None


def less_hidden(beside: Sequence[str]) -> str:
    """The end of a message that nothing was found, where something is hidden among what lies `beside` data."""
    hidden = next((path for path in beside if is_hidden(name_of(path))), None)
    return "" if hidden is None else f"; names that begin with _ are left out: {hidden} is read if it is named itself"
