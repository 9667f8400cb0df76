"""Files of JSON lines that a stopped run can go on writing as if it had not been stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from chunkplan.errors import ChunkplanError
from chunkplan_runtime.training.save import NO_ROOM


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `rows` at the end of a file, at once.

    Raises:
        ChunkplanError: it cannot be written, for example because the disk is full.
    """
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ChunkplanError(f"cannot be written: {error.strerror}", where=str(path), hint=NO_ROOM) from error


def cut_back(path: Path, step: int) -> None:
    """Leave the lines before the first whose `step` is `step` or later, or that is torn. No file: nothing to do."""
    if not path.exists():
        return
    end = 0
    with path.open("rb+") as file:
        for line in file:
            if not _is_before(line, step):
                break
            end += len(line)
        file.truncate(end)
        os.fsync(file.fileno())


def _is_before(line: bytes, step: int) -> bool:
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n") and isinstance(row, dict) and row.get("step", step) < step
