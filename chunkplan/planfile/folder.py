"""Whole-or-nothing output: everything is written to a temporary name, synced, and renamed into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chunkplan.errors import UsageError

MANIFEST = "manifest.json"


@contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that takes its place when the block ends without an error.

    A killed run leaves the old folder or none, never half of a new one. Only an empty folder or one with a manifest
    (an analysis or a plan) is replaced.

    Raises:
        UsageError: `target` is a file, or a folder with other things in it.
    """
    if target.exists() and not is_replaceable(target):
        raise UsageError(
            f"{target} exists and is neither an analysis nor a plan",
            hint="choose another folder; this one would have been replaced as a whole",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        for path in sorted(temporary.rglob("*")):
            _sync(path)
        _sync(temporary)
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def is_replaceable(target: Path) -> bool:
    """Whether `target` is a folder that an analysis or a plan may replace."""
    return target.is_dir() and ((target / MANIFEST).is_file() or not any(target.iterdir()))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
