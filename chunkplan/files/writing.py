"""Files written whole or not at all, and over nothing that is read; errors of the system that a user can act on.

There is one writer at a time, by a lock that the kernel lets go of when its process ends, however it ends. What must
not stay behind is undone, whether its block ends or the process does in the middle of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO

from chunkplan.errors import UsageError

_ROOM_HINT = "make room, or write to another disk"

_IS_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_IS_REFUSED = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
}
_OTHER_HINTS = {
    errno.ENAMETOOLONG: "give a shorter name: until it is whole it has a longer one",
    errno.ELOOP: "links on the way to it lead to themselves: give another name",
}

#: The most characters of a command that a lock shows.
_MOST_CHARACTERS = 200

#: Errors of the system for a link, a folder, and a socket or a device without a driver.
_NO_FILE = {errno.ELOOP, errno.EISDIR, errno.ENXIO}

_undoings: dict[object, Callable[[], None]] = {}

#: Held while something is made that is undone later, while it is undone, and where half of a change is none; for good
#: by who ends the process.
changing = threading.RLock()


@contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Call `undo` when the block ends, or `end_process` ends the process in it.

    What may be there only if it is undone is made, and the block begun, while `changing` is held.
    """
    key = object()
    _undoings[key] = undo
    try:
        yield
    finally:
        with changing:
            del _undoings[key]
            undo()


def end_process(code: int, last_words: str = "") -> NoReturn:
    """End the process from any thread, whatever the others are doing: all is undone, and no word follows the last."""
    changing.acquire()
    for undo in reversed(_undoings.values()):
        with suppress(Exception):
            undo()
    stderr = sys.stderr
    with suppress(Exception):
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (until the process ends)
        print(end=last_words, file=stderr, flush=True)
    os._exit(code)


@contextmanager
def filling(place: Path, *, hint: str = _ROOM_HINT) -> Iterator[None]:
    """Turn a full disk, while `place` is written, into a UsageError; errors of reading are raised as they are."""
    try:
        yield
    except OSError as error:
        if error.errno in _IS_FULL:
            raise UsageError(f"no room is left to write {_final(place)}: {_reason(error)}", hint=hint) from error
        raise


@contextmanager
def writing(place: Path, *, room_hint: str = _ROOM_HINT) -> Iterator[None]:
    """Turn errors of writing `place`, a file or what is below a folder, into a UsageError.

    Raises UsageError: no room is left (with the hint `room_hint`), or the place is not there or not ours to write.
    """
    try:
        with filling(place, hint=room_hint):
            yield
    except OSError as error:
        if error.errno in _IS_REFUSED:
            hint = _OTHER_HINTS.get(error.errno, "check that the folder is there, and its permissions")
            raise UsageError(f"cannot write {_final(place)}: {_reason(error)}", hint=hint) from error
        raise


def _final(place: Path) -> Path:
    """`place` by its final name: without the temporary names of folders on the way."""
    return Path(*(re.sub(r"^\.(.+)\.tmp-.+$", r"\1", part) for part in place.parts))


def _reason(error: OSError) -> str:
    """The system's message of an error, without the prefix of pyarrow."""
    return os.strerror(error.errno) if error.errno else str(error)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Yield a file under a temporary name beside `path`, synced and then renamed when the block ends without an error.

    What a link points at is replaced, not the link; into a pipe or a device it is written as it comes. Raises
    UsageError: `path` is a folder or cannot be written.
    """
    with writing(path):
        places = _target_and_temporary(path)
        if places is None:
            with path.open("w", encoding="utf-8") as file:
                yield file
            return
        target, temporary = places
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

    Raises UsageError: `path` is a folder or cannot be written.
    """
    with writing(path):
        places = _target_and_temporary(path)
        if places is not None:
            with changing, undone(partial(places[1].unlink, missing_ok=True)):
                places[1].touch()


def _target_and_temporary(path: Path) -> tuple[Path, Path] | None:
    """The real target of `path` and its temporary name; None for a pipe or a device, which is not replaced."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint="give the name of a file in it")
    if path.exists() and not path.is_file():
        return None
    target = Path(os.path.realpath(path))
    return target, target.parent / f".{target.name}.tmp-{os.getpid()}"


def refuse_overwriting(output: Path, inputs: Iterable[Path | str | None]) -> None:
    """Refuse to write `output` over one of `inputs`, or into a folder that is one.

    Raises UsageError: naming the input.
    """
    target = Path(os.path.realpath(output))
    for path in inputs:
        if path is not None and target.is_relative_to(os.path.realpath(path)):
            raise UsageError(
                f"writing {output} would damage {path}, which is read", hint="give the output another name, elsewhere"
            )


@contextmanager
def hold(target: Path) -> Iterator[None]:
    """Keep other runs from writing `target` until the block ends.

    The lock is on a file beside it, `.NAME.lock`, which says who holds it and is removed at the end. One that a killed
    run left is in nobody's way. Where the file system has no locks the block runs without one. Raises UsageError:
    another run holds `target`, or its lock is no file but a link, a pipe or the like; OSError: no file can be written
    there.
    """
    path = target.with_name(f".{target.name}.lock")

    def let_go() -> None:
        path.unlink(missing_ok=True)
        os.close(descriptor)

    with ExitStack() as held:
        with changing:
            descriptor = _take(path, target)
            held.enter_context(undone(let_go))
        os.ftruncate(descriptor, 0)
        os.write(descriptor, _describe_this_run().encode("utf-8", "replace"))
        yield


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder, without waiting; False where its file system has no locks.

    Raises BlockingIOError: another process holds it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some network file systems have none
        return False
    return True


def _take(path: Path, target: Path) -> int:
    while True:
        descriptor = _open(path)
        try:
            has_lock = try_lock(descriptor)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 4096, 0).decode("utf-8", "replace") or "it has just begun"
            os.close(descriptor)
            raise UsageError(
                f"another run is writing {target} ({holder})",
                hint="wait for it to end, or write elsewhere with --output or --workspace",
            ) from error
        if not has_lock or _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # its holder removed it after it was opened here: only who makes a new one holds anything


def _open(path: Path) -> int:
    """Open a lock that is a file by this name: what a link points at would be overwritten."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _no_file(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_file(path)
    return descriptor


def _no_file(path: Path) -> UsageError:
    return UsageError(
        f"{path} is to be a file that says who writes, and is something else",
        hint="remove it if you know what it is, or write elsewhere with --output or --workspace",
    )


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _describe_this_run() -> str:
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    if len(command) > _MOST_CHARACTERS:
        command = f"{command[:_MOST_CHARACTERS]}..."
    return f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}: {command}"
