"""A file that is written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from chunkplan.writing import writing


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Yield a file under a temporary name beside `path`, synced and then renamed when the block ends without an error.

    Raises:
        UsageError: `path` cannot be written.
    """
    temporary = path.parent / f".{path.name}.tmp-{os.getpid()}"
    with writing(path):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
