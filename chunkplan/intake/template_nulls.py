"""Nulls of a conversation that a chat template prints as the word None.

A template takes `null` for Python's None and may print it, as in `{{ value }}`. To distinguish that word from the same
word in the data, a conversation is rendered again with a null that is None to everything a template asks, and prints as
a mark.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import Any

#: Around the number of a null; no letters, which a template might change.
_START, _END = f"\ue008{secrets.randbelow(10**30):030d}\ue00a", "\ue009"
_MARK = re.compile(f"{_START}([0-9]+){_END}")


class Null:
    """None, for templates; `tojson` and `is none` know it."""

    def __init__(self, number: int) -> None:
        self._mark = f"{_START}{number}{_END}"

    def __str__(self) -> str:
        return self._mark

    __repr__ = __str__

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Null)

    def __hash__(self) -> int:
        return hash(None)


class MarkedNulls:
    """The nulls that were found in values; `paths` says where each was."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def mark(self, value: Any, path: str) -> Any:
        """A copy of JSON `value`, found at `path`, with marked nulls inside of it."""
        if isinstance(value, dict):
            return {key: self._mark(item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._mark(item, f"{path}[{index}]") for index, item in enumerate(value)]
        return value

    def _mark(self, value: Any, path: str) -> Any:
        if value is not None:
            return self.mark(value, path)
        self.paths.append(path)
        return Null(len(self.paths) - 1)

    def first_printed(self, texts: Iterable[str]) -> str | None:
        """The path of the first null that is printed in `texts`, or None."""
        found = next(filter(None, map(_MARK.search, texts)), None)
        return None if found is None else self.paths[int(found[1])]
