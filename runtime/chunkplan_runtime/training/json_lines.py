"""Files of JSON lines that a stopped run can go on writing as if it had not been stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from chunkplan_runtime.training.save import saving


def append_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append `rows` to a file, in one write.

    Raises:
        ChunkplanError: it cannot be written, for example because the disk is full.
    """
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    with saving(path), path.open("a", encoding="utf-8") as file:
        file.write(text)


def cut_back(path: Path, step: int) -> None:
    """Leave the lines before the first whose `step` is `step` or later, or that is torn. No file: nothing to do."""
    if not path.exists():
        return
    end = sum(map(len, _before(path, step)))
    with path.open("rb+") as file:
        file.truncate(end)
        os.fsync(file.fileno())


def lines_before(path: Path, step: int) -> list[Any]:
    """The rows that `cut_back` would leave; none where there is no file."""
    return [json.loads(line) for line in _before(path, step)] if path.exists() else []


def _before(path: Path, step: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from takewhile(lambda line: _is_before(line, step), file)


def _is_before(line: bytes, step: int) -> bool:
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n") and isinstance(row, dict) and row.get("step", step) < step
