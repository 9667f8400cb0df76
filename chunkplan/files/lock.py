"""One writer at a time: a lock that the kernel lets go of when its process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from chunkplan.errors import UsageError
from chunkplan.files.writing import changing, undone

#: The most characters of a command that a lock shows.
_MOST_CHARACTERS = 200

#: What the system says of a link, of a folder, and of a socket or a device without a driver.
_NO_FILE = {errno.ELOOP, errno.EISDIR, errno.ENXIO}


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
