"""Whole-or-nothing output: everything is written to a temporary name, synced, and renamed into place."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from chunkplan.errors import UsageError
from chunkplan.files.writing import changing, filling, hold, undone, writing

MANIFEST = "manifest.json"

#: Our file in the folder of an export, beside those of its format.
EXPORT = "export.json"

#: Says that a folder is a cache, to whatever reads or backs up folders (https://bford.info/cachedir/).
CACHE_TAG = "CACHEDIR.TAG"

#: What each kind of folder holds (patterns of files, and of folders with a "/" behind). One that holds anything else,
#: such as a run's weights, is never replaced.
_CONTENTS = {
    "analysis": r"manifest\.json|sequences\.parquet|rejected\.jsonl|tokens/(part-\d+\.arrow)?",
    "plan": r"manifest\.json|(steps|chunks|schedule|prefixes)\.parquet",
    "shard": r"manifest\.json|pieces/(\w+/((lengths|tokens)\.arrow|digests\.bin|rejected\.jsonl)?)?",
    # `datasets` caches what it makes of a dataset beside it.
    "export": r"export\.json|data-\d+-of-\d+\.(arrow|jsonl|idx\.parquet)|(state|dataset_info)\.json|cache-.+\.arrow"
    r"|step-\d+-rank-\d+\.csv|microbatches\.jsonl",
}

#: What is in the file that says of which kind a folder is, whatever else of it is damaged or of another version:
#: without it, what has these names may be somebody else's.
_MARKS = {
    **{kind: (MANIFEST, rf'"kind":\s*"{kind}"') for kind in ("analysis", "plan", "shard")},
    "export": (EXPORT, r'"format":\s*"[\w-]+",\s*"tool_version":'),
}

#: Bytes in which a mark is looked for: it is among the first that are written.
_MARK_CHARACTERS = 1 << 20

_NAMES = {"analysis": "an analysis", "plan": "a plan", "shard": "a shard of an analysis", "export": "an export"}


@contextmanager
def replace_folder(target: Path, kind: str) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that takes its place when the block ends without an error.

    A killed run leaves the old folder or none, never half of a new one; if none, the next run puts the old one back.
    Only an empty folder or one of the same kind (see `_MARKS`), with nothing else in it (see `_CONTENTS`), is replaced.
    Raises UsageError: `target` is something else, cannot be written, holds the current folder or lies in a folder of
    ours, or another run is writing it.
    """
    with reserve_folder(target, kind), fill_folder(target) as temporary:
        yield temporary


@contextmanager
def reserve_folder(target: Path, kind: str) -> Iterator[None]:
    """The first half of `replace_folder`, before long work: until the block ends no other run writes `target`.

    What runs that were killed left is removed, or put back where `target` was between its old and its new content.
    """
    refuse_other_content(target, kind)
    target = Path(os.path.realpath(target))
    with ExitStack() as held:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(hold(target))
            for old in _left_behind(target.parent, target.name, "old"):  # killed between the two renames
                if not target.exists():
                    old.rename(target)
            remove_left_behind(target.parent, target.name)
        yield


@contextmanager
def fill_folder(target: Path) -> Iterator[Path]:
    """The second half of `replace_folder`: yield the temporary folder that takes the place of a reserved `target`."""
    target = Path(os.path.realpath(target))
    with ExitStack() as made:
        with writing(target):
            temporary = made.enter_context(temporary_folder(target.parent, target.name))
        with filling(target):
            yield temporary
        with writing(target):
            put_in_place(temporary, target)


def put_in_place(temporary: Path, target: Path) -> None:
    """Sync a folder of `temporary_folder` and give it the name of `target`, whose old content, if any, takes its own.

    What is called old is always whole: it is removed under the other name.
    """
    for path in sorted(temporary.rglob("*")):
        sync(path)
    sync(temporary)
    old = temporary.with_name(temporary.name.replace(".tmp-", ".old-"))
    with changing:
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

    Its name has the host and the process in it, so that `remove_left_behind` finds those of runs that were killed.
    """
    parent.mkdir(parents=True, exist_ok=True)
    owner = f"{socket.gethostname()}-{os.getpid()}"
    with ExitStack() as made:
        with changing:
            temporary = Path(tempfile.mkdtemp(prefix=f".{name}.tmp-{owner}-", dir=parent))
            made.enter_context(undone(partial(_remove, temporary)))
        let_umask_decide(temporary)
        yield temporary


def _remove(folder: Path) -> None:
    """Remove a temporary folder, if it is there; under another name, so that no thread makes a file in it meanwhile."""
    with suppress(OSError):
        folder = folder.rename(folder.with_name(f"{folder.name}x"))
    shutil.rmtree(folder, ignore_errors=True)


def refuse_other_content(target: Path, kind: str) -> None:
    """Raise the UsageError of `replace_folder`; before long work, so that it is not done in vain."""
    if "\0" in str(target):
        raise UsageError(f"{str(target)!r} is no path", hint="give another name")
    with writing(target):
        refuse_inside_ours(target)
        try:
            target.stat()
        except FileNotFoundError:
            return
        if _is_around_us(target):
            raise UsageError(
                f"{target} is the current folder, or around it, and would be replaced as a whole",
                hint="give a folder in it, such as --output result, or work in another one",
            )
        why = _why_not_just(target, kind)
    if why is not None:
        raise UsageError(
            f"{target} exists and is not just {_NAMES[kind]}: {why}",
            hint="give another --output, or remove it yourself: it would have been replaced as a whole",
        )


def refuse_inside_ours(target: Path) -> None:
    """Refuse to write into a folder of ours, which would then hold more than that, and never be replaced again.

    Raises UsageError: naming that folder.
    """
    for folder in Path(os.path.realpath(target)).parents:
        for kind, name in _NAMES.items():
            if _is_marked(folder, kind):
                raise UsageError(f"{target} lies in {folder}, which is {name}", hint="give another --output, elsewhere")


def _is_around_us(target: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(os.path.realpath(target))
    except FileNotFoundError:  # the current folder was removed
        return False


def _why_not_just(target: Path, kind: str) -> str | None:
    """None for a folder that is empty, or is of the kind and has nothing in it that is not."""
    if not target.is_dir():
        return "it is no folder"
    paths = {path: path.is_dir() and not path.is_symlink() for path in target.rglob("*")}  # a link is no folder
    names = [path.relative_to(target).as_posix() + "/" * is_folder for path, is_folder in paths.items()]
    strangers = [name for name in names if not re.fullmatch(_CONTENTS[kind], name)]
    if strangers:
        return f"{min(strangers)} is in it"
    return f"no {_MARKS[kind][0]} says that it is one" if names and not _is_marked(target, kind) else None


def _is_marked(folder: Path, kind: str) -> bool:
    marked, mark = _MARKS[kind]
    if not (folder / marked).is_file():
        return False
    with (folder / marked).open(errors="replace") as file:
        return re.search(mark, file.read(_MARK_CHARACTERS)) is not None


def remove_left_behind(parent: Path, name: str | None = None, *, by_anyone: bool = False) -> None:
    """Remove what runs on this machine left in `parent` when they were killed; that of `name` alone, if given.

    With `by_anyone` also what other machines and `whole_file` left, for a caller that knows that no other run is there.
    """
    for path in _left_behind(parent, name, "tmp|old", by_anyone=by_anyone):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _left_behind(parent: Path, name: str | None, kinds: str, *, by_anyone: bool = False) -> list[Path]:
    """Folders that runs on this machine, which are no more, made beside `name`, or beside anything."""
    own = r"\..+" if name is None else rf"\.{re.escape(name)}"
    if by_anyone:
        return [path for path in parent.iterdir() if re.fullmatch(rf"{own}\.({kinds})-[\w.-]+", path.name)]
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


def let_umask_decide(path: Path) -> None:
    """Give a temporary file or folder, readable by its owner alone, the permissions of a new one."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
