"""Whole-or-nothing output: everything is written to a temporary name, synced, and renamed into place."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
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
    _remove_left_behind(target)
    owner = f"{socket.gethostname()}-{os.getpid()}"
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-{owner}-", dir=target.parent))
    temporary.chmod(0o777 & ~_umask())
    old = temporary.with_name(temporary.name.replace(".tmp-", ".old-"))
    try:
        yield temporary
        for path in sorted(temporary.rglob("*")):
            sync(path)
        sync(temporary)
        if target.exists():
            target.rename(old)
        try:
            temporary.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
        sync(target.parent)
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


def _remove_left_behind(target: Path) -> None:
    """Remove what runs on this machine left beside `target` when they were killed."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(tmp|old)-{re.escape(socket.gethostname())}-(\d+)-\w+")
    for path in target.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match and not _is_running(int(match[2])):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _umask() -> int:
    """What a new folder is not allowed; mkdtemp makes folders that only their owner may read."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Have what was written to a file or a folder reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
