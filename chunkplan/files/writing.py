"""Turns errors of the system while writing into errors that a user can act on."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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

    Raises:
        UsageError: no room is left (with the hint `room_hint`), or the place is not there or not ours to write.
    """
    try:
        with filling(place, hint=room_hint):
            yield
    except OSError as error:
        if error.errno in _IS_REFUSED:
            raise UsageError(
                f"cannot write {_final(place)}: {_reason(error)}",
                hint=_OTHER_HINTS.get(error.errno, "check that the folder is there, and its permissions"),
            ) from error
        raise


def _final(place: Path) -> Path:
    """`place` by its final name: without the temporary names of folders on the way."""
    return Path(*(re.sub(r"^\.(.+)\.tmp-.+$", r"\1", part) for part in place.parts))


def _reason(error: OSError) -> str:
    """What the system says of an error, without what pyarrow puts before it."""
    return os.strerror(error.errno) if error.errno else str(error)
