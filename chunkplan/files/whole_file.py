"""A file that is written whole or not at all, and over nothing that is read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

from chunkplan.errors import UsageError
from chunkplan.files.undone import changing, undone
from chunkplan.files.writing import writing


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Yield a file under a temporary name beside `path`, synced and then renamed when the block ends without an error.

    What a link points at is replaced, not the link; into a pipe or a device it is written as it comes.

    Raises:
        UsageError: `path` is a folder or cannot be written.
    """
    with writing(path):
        _refuse_folder(path)
        if _is_written_into(path):
            with path.open("w", encoding="utf-8") as file:
                yield file
            return
        target, temporary = _target_and_temporary(path)
        with ExitStack() as made:
            with changing:
                made.enter_context(undone(partial(temporary.unlink, missing_ok=True)))
                file = made.enter_context(temporary.open("w", encoding="utf-8"))
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(target)


def refuse_unwritable(path: Path) -> None:
    """Refuse what `whole_file` could not write, for who has much to compute first.

    Raises:
        UsageError: `path` is a folder or cannot be written.
    """
    with writing(path):
        _refuse_folder(path)
        if not _is_written_into(path):
            _, temporary = _target_and_temporary(path)
            with changing, undone(partial(temporary.unlink, missing_ok=True)):
                temporary.touch()


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint="give the name of a file in it")


def _is_written_into(path: Path) -> bool:
    """Whether `path` is a pipe or a device, which is not replaced."""
    return path.exists() and not path.is_file()


def _target_and_temporary(path: Path) -> tuple[Path, Path]:
    target = Path(os.path.realpath(path))
    return target, target.parent / f".{target.name}.tmp-{os.getpid()}"


def refuse_overwriting(output: Path, inputs: Iterable[Path | str | None]) -> None:
    """Refuse to write `output` over one of `inputs`, or into a folder that is one.

    Raises:
        UsageError: naming the input.
    """
    target = Path(os.path.realpath(output))
    for path in inputs:
        if path is not None and target.is_relative_to(os.path.realpath(path)):
            raise UsageError(
                f"writing {output} would damage {path}, which is read", hint="give the output another name, elsewhere"
            )
