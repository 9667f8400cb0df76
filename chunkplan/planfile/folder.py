"""Whole-or-nothing output: everything is written to a temporary name, synced, and renamed into place."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path

from chunkplan.errors import UsageError
from chunkplan.planfile.lock import hold
from chunkplan.writing import filling, writing

MANIFEST = "manifest.json"

#: What is known of an export, beside files of other people's formats.
EXPORT = "export.json"

#: Says that a folder is a cache, to whatever reads or backs up folders (https://bford.info/cachedir/).
CACHE_TAG = "CACHEDIR.TAG"

#: What each kind of folder holds (patterns). One that holds anything else, such as a run's weights, is never replaced.
_CONTENTS = {
    "analysis": {MANIFEST, "sequences.parquet", "tokens", "rejected.jsonl"},
    "plan": {MANIFEST, "steps.parquet", "chunks.parquet", "schedule.parquet"},
    "shard": {MANIFEST, "pieces"},
    # `datasets` caches what it makes of a dataset beside it.
    "export": {EXPORT, "data-*-of-*", "state.json", "dataset_info.json", "cache-*.arrow"},
}

#: What a folder has to hold to be of the kind: without it, what has these names may be somebody else's.
_REQUIRED = {"export": EXPORT}

_NAMES = {"analysis": "an analysis", "plan": "a plan", "shard": "a shard of an analysis", "export": "an export"}


@contextmanager
def replace_folder(target: Path, kind: str) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that takes its place when the block ends without an error.

    A killed run leaves the old folder or none, never half of a new one; if none, the next run puts the old one back.
    Only an empty folder or one of the same kind (see `_CONTENTS`), with nothing else in it, is replaced.

    Raises:
        UsageError: `target` is something else or cannot be written, or another run is writing it.
    """
    with reserve_folder(target, kind), fill_folder(target) as temporary:
        yield temporary


@contextmanager
def reserve_folder(target: Path, kind: str) -> Iterator[None]:
    """The first half of `replace_folder`, before long work: until the block ends no other run writes `target`.

    What runs that were killed left is removed, or put back where `target` was between its old and its new content.
    """
    refuse_other_content(target, kind)
    target = target.resolve()
    with ExitStack() as held:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(hold(target))
            _put_back(target)
            remove_left_behind(target.parent, target.name)
        yield


@contextmanager
def fill_folder(target: Path) -> Iterator[Path]:
    """The second half of `replace_folder`: yield the temporary folder that takes the place of a reserved `target`."""
    target = target.resolve()
    with ExitStack() as made:
        with writing(target):
            temporary = made.enter_context(temporary_folder(target.parent, target.name))
        with filling(target):
            yield temporary
        with writing(target):
            _swap(temporary, target)


def _swap(temporary: Path, target: Path) -> None:
    """Sync a folder and put it in place of `target`, whose old content has its name afterwards.

    What is called old is always whole: it is removed under the other name.
    """
    for path in sorted(temporary.rglob("*")):
        sync(path)
    sync(temporary)
    old = temporary.with_name(temporary.name.replace(".tmp-", ".old-"))
    try:
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        sync(target.parent)
    finally:
        if old.exists():
            old.rename(temporary if target.exists() else target)


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
    if not target.exists() or (target.is_dir() and _is_just({path.name for path in target.iterdir()}, kind)):
        return
    raise UsageError(
        f"{target} exists and is not just {_NAMES[kind]}",
        hint="give another --output; this one would have been replaced as a whole",
    )


def _is_just(names: set[str], kind: str) -> bool:
    known = all(any(fnmatch(name, pattern) for pattern in _CONTENTS[kind]) for name in names)
    return known and (not names or kind not in _REQUIRED or _REQUIRED[kind] in names)


def remove_left_behind(parent: Path, name: str | None = None) -> None:
    """Remove what runs on this machine left in `parent` when they were killed; that of `name` alone, if given."""
    for path in _left_behind(parent, name, "tmp|old"):
        shutil.rmtree(path, ignore_errors=True)


def _put_back(target: Path) -> None:
    """Undo the first of the two renames of a run that was killed before the second."""
    for old in _left_behind(target.parent, target.name, "old"):
        if not target.exists():
            old.rename(target)


def _left_behind(parent: Path, name: str | None, kinds: str) -> list[Path]:
    """Folders that runs on this machine, which are no more, made beside `name`, or beside anything."""
    own = r"\..+" if name is None else rf"\.{re.escape(name)}"
    pattern = re.compile(rf"{own}\.({kinds})-{re.escape(socket.gethostname())}-(\d+)-\w+")
    matches = {path: pattern.fullmatch(path.name) for path in parent.iterdir()}
    return [path for path, match in matches.items() if match and not _is_running(int(match[2]))]


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
