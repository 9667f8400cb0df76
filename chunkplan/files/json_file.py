"""A JSON document in a file: written whole or not at all, and read even if somebody else wrote it."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from chunkplan.errors import DataError
from chunkplan.files.whole_file import whole_file

#: Far beyond what is written: the manifest of a million files has half of it.
MAX_BYTES = 1 << 30

#: Far beyond what is written, and so few that they become a number at once.
MAX_DIGITS = 1000

#: Far beyond what is written, and so little that nothing which walks through a document runs out of stack.
MAX_DEPTH = 64

_TOO_DEEP = f"nested deeper than {MAX_DEPTH}"


def read_json(path: Path, *, hint: str, infinity: bool = False) -> Any:
    """The document in a file that anybody may have written; with `infinity` that may be one of its numbers.

    Raises:
        DataError: it is larger than `MAX_BYTES`, not UTF-8, not JSON (NaN, infinity and 1e999 are not), has a key twice
            in one object or half a character in a string, or is nested deeper than `MAX_DEPTH`.
    """
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"larger than {MAX_BYTES:,} bytes", where=str(path), hint=hint)
    try:
        document = json.loads(
            path.read_text(encoding="utf-8"),
            parse_constant=_infinity if infinity else _refuse_constant,
            parse_float=_finite,
            parse_int=_short,
            object_pairs_hook=_distinct,
        )
        _check_values(document)
    except RecursionError as error:
        raise DataError(f"not JSON: {_TOO_DEEP}", where=str(path), hint=hint) from error
    except ValueError as error:
        raise DataError(f"not JSON: {error}", where=str(path), hint=hint) from error
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is none of its numbers")


def _infinity(name: str) -> float:
    return _refuse_constant(name) if name == "NaN" else float(name)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.20} is too large")
    return value


def _short(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"{text:.20}... is too large")
    return int(text)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        [(repeated, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {repeated!r} is there twice in one object")
    return entries


def _check_values(document: Any) -> None:
    """Raises ValueError (a UnicodeEncodeError is one) where strings or the nesting are not as `read_json` has it."""
    level = [document]
    for _ in range(MAX_DEPTH):
        "".join(value for value in level if isinstance(value, str)).encode()
        objects = [value for value in level if isinstance(value, dict)]
        lists = [value for value in level if isinstance(value, list)]
        level = [inner for values in (*objects, *map(dict.values, objects), *lists) for inner in values]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def write_json(path: Path, document: Any, *, indent: int | None = None) -> None:
    """Write `document` to `path`.

    Raises:
        UsageError: `path` cannot be written.
    """
    with whole_file(path) as file:
        json.dump(document, file, indent=indent, allow_nan=False)
        file.write("\n")
