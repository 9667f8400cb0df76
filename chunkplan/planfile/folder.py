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

#: Says that a folder is a cache, to whatever reads or backs up folders (https://bford.info/cachedir/).
CACHE_TAG = "CACHEDIR.TAG"

#: What each kind of folder holds. One that holds anything else, such as a run's weights, is never replaced.
_CONTENTS = {
    "analysis": {MANIFEST, "sequences.parquet", "tokens", "rejected.jsonl"},
    "plan": {MANIFEST, "steps.parquet", "chunks.parquet", "schedule.parquet"},
    "shard": {MANIFEST, "pieces"},
}

_NAMES = {"analysis": "an analysis", "plan": "a plan", "shard": "a shard of an analysis"}


@contextmanager
def replace_folder(target: Path, kind: str) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that takes its place when the block ends without an error.

    A killed run leaves the old folder or none, never half of a new one. Only an empty folder or one of the same kind
    ("analysis", "plan" or "shard"), with nothing else in it, is replaced.

    Raises:
        UsageError: `target` is something else.
    """
    refuse_other_content(target, kind)
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_left_behind(target.parent, target.name)
    with temporary_folder(target.parent, target.name) as temporary:
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
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def temporary_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new folder in `parent` that is removed when the block ends, unless it was renamed by then.

    Its name tells whose it is, so that `remove_left_behind` finds those of runs that were killed.
    """
    parent.mkdir(parents=True, exist_ok=True)
    owner = f"{socket.gethostname()}-{os.getpid()}"
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}.tmp-{owner}-", dir=parent))
    temporary.chmod(0o777 & ~_umask())
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_other_content(target: Path, kind: str) -> None:
    """Raise the UsageError of `replace_folder`; before long work, so that it is not done in vain."""
    if not target.exists() or (target.is_dir() and {path.name for path in target.iterdir()} <= _CONTENTS[kind]):
        return
    raise UsageError(
        f"{target} exists and is not just {_NAMES[kind]}",
        hint="give another --output; this one would have been replaced as a whole",
    )


def remove_left_behind(parent: Path, name: str | None = None) -> None:
    """Remove what runs on this machine left in `parent` when they were killed; that of `name` alone, if given."""
    own = r"\..+" if name is None else rf"\.{re.escape(name)}"
    pattern = re.compile(rf"{own}\.(tmp|old)-{re.escape(socket.gethostname())}-(\d+)-\w+")
    for path in parent.iterdir():
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
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] != "Z"  # it has ended, and nobody asks for its exit code


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
