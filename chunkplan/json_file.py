"""A JSON document in a file, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chunkplan.whole_file import whole_file


def write_json(path: Path, document: Any, *, indent: int | None = None) -> None:
    """Write `document` to `path`.

    Raises:
        UsageError: `path` cannot be written.
    """
    with whole_file(path) as file:
        json.dump(document, file, indent=indent, allow_nan=False)
        file.write("\n")
