"""JSON documents in files: written whole or not at all, and read even if somebody else wrote them.

The files of a plan or an analysis are its own: nothing is read that its folder only points at.
"""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn

from chunkplan.errors import DataError
from chunkplan.files.writing import whole_file

#: Far beyond what is written: the manifest of a million files has half of it.
MAX_BYTES = 1 << 30

#: Far beyond what is written, and so few that they become a number at once.
MAX_DIGITS = 1000

#: Far beyond what is written, and so little that nothing which walks through a document runs out of stack.
MAX_DEPTH = 64

_TOO_DEEP = f"nested deeper than {MAX_DEPTH}"

#: It may not be read, too many files are open, or the disk fails.
_OF_THE_MACHINE = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.EIO}


def read_json(path: Path, *, hint: str, infinity: bool = False) -> Any:
    """The document in a file that anybody may have written; with `infinity` that may be one of its numbers.

    Raises DataError: it is larger than `MAX_BYTES`, not UTF-8, not JSON (NaN, infinity and 1e999 are not), has a key
    twice in one object or half a character in a string, or is nested deeper than `MAX_DEPTH`.
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
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"the key {key!r} is there twice in one object")
        entries[key] = value
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

    Raises UsageError: `path` cannot be written.
    """
    with whole_file(path) as file:
        json.dump(document, file, indent=indent, allow_nan=False)
        file.write("\n")


def refuse_outside(path: Path, folder: Path) -> None:
    """Refuse a file of `folder` that is a link out of it or to itself, or no regular file: a pipe would block.

    The folder itself may be a link, and links within it are followed. Raises DataError: it is one of these, or not
    there.
    """
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(os.path.realpath(folder)):
        raise DataError(
            f"a link to {target}, outside of its folder",
            where=str(path),
            hint="if you trust it, copy the folder with what its links point at: cp -rL",
        )
    if not target.is_file():
        what = "not a regular file" if os.path.lexists(target) else "missing"
        raise DataError(what, where=str(path), hint="write it again with `chunkplan analyze` or `chunkplan build`")


def raise_if_unreadable(error: Exception) -> None:
    """Raise `error` again if it is one of the machine, not of the content of a file."""
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        raise error
