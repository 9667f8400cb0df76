"""Whole-or-nothing output: everything is written to a temporary name, synced, and renamed into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chunkplan.errors import UsageError

MANIFEST = "manifest.json"

#: What each kind of folder holds. One that holds anything else, such as a run's weights, is never replaced.
_CONTENTS = {
    "analysis": {MANIFEST, "sequences.parquet", "tokens"},
    "plan": {MANIFEST, "steps.parquet", "chunks.parquet", "schedule.parquet"},
}


@contextmanager
def replace_folder(target: Path, kind: str) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that takes its place when the block ends without an error.

    A killed run leaves the old folder or none, never half of a new one. Only an empty folder or one of the same kind
    ("analysis" or "plan"), with nothing else in it, is replaced.

    Raises:
        UsageError: `target` is something else.
    """
    refuse_other_content(target, kind)
    target = target.resolve()
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


def refuse_other_content(target: Path, kind: str) -> None:
    """Raise the UsageError of `replace_folder`; before long work, so that it is not done in vain."""
    if not target.exists() or (target.is_dir() and {path.name for path in target.iterdir()} <= _CONTENTS[kind]):
        return
    raise UsageError(
        f"{target} exists and is not just {'an analysis' if kind == 'analysis' else 'a plan'}",
        hint="give another --output; this one would have been replaced as a whole",
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
