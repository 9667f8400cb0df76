"""A file that is written whole or not at all, and over nothing that is read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from chunkplan.errors import UsageError
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


def refuse_overwriting(output: Path, inputs: Iterable[Path | str | None]) -> None:
    """Before anything is read: refuse to write `output` over one of `inputs`, or into a folder that is one.

    Raises:
        UsageError: naming the input.
    """
    target = output.resolve()
    for path in inputs:
        if path is not None and target.is_relative_to(Path(path).resolve()):
            raise UsageError(
                f"writing {output} would damage {path}, which is read", hint="give the output another name, elsewhere"
            )
