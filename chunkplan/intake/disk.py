"""Whether the disk has room for what is about to be written: asked before, so that little fails halfway."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chunkplan.errors import UsageError

#: Left to everybody else.
_RESERVE = 256 << 20

#: Bytes that are stored for a byte of text where tokens are long, and where every character is one.
LEAST, MOST = 0.6, 5.5

_ROOM_HINT = (
    "make room, put --workspace elsewhere, or store lengths only with --no-tokens; what was finished is not done again"
)

_IS_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_IS_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT}


def check_room(folder: Path, num_bytes: float, what: str) -> None:
    """Refuse to begin `what`, which writes about `num_bytes` below `folder`, where there is no room for it.

    Raises:
        UsageError: the disk has less than that, and a reserve.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _RESERVE:
        raise UsageError(
            f"{what} takes about {_size(num_bytes)} and {folder} has {_size(free)} left",
            hint=_ROOM_HINT,
        )


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns what the system has against writing below `folder` into a UsageError."""
    try:
        yield
    except OSError as error:
        place = error.filename or folder
        if error.errno in _IS_FULL:
            raise UsageError(f"no room is left to write {place} ({error.strerror})", hint=_ROOM_HINT) from error
        if error.errno in _IS_REFUSED:
            raise UsageError(
                f"cannot write {place}: {error.strerror}",
                hint="check the path and its permissions",
            ) from error
        raise


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"
