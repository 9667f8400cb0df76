"""A JSON document in a file, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from chunkplan.errors import UsageError


def write_json(path: Path, document: Any, *, indent: int | None = None) -> None:
    """Write `document` to a temporary name beside `path`, synced and then renamed.

    Raises:
        UsageError: `path` cannot be written.
    """
    temporary = path.parent / f".{path.name}.tmp-{os.getpid()}"
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(document, file, indent=indent, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="name a file in a folder that is there"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
