"""The files of a plan or an analysis are its own: nothing is read that its folder only points at."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from chunkplan.errors import DataError

#: It may not be read, too many files are open, or the disk fails.
_OF_THE_MACHINE = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.EIO}


def refuse_outside(path: Path, folder: Path) -> None:
    """Refuse a file of `folder` that is a link out of it or to itself, or no regular file: a pipe would be waited
    for without end.

    The folder itself may be a link, and links within it are followed.

    Raises:
        DataError: it is one of these, or not there.
    """
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(os.path.realpath(folder)):
        raise DataError(
            f"a link to {target}, outside of its folder",
            where=str(path),
            hint="if you trust it, copy the folder with what its links point at: cp -rL",
        )
    if not target.is_file():
        what = "not a regular file" if os.path.lexists(target) else "missing"
        raise DataError(what, where=str(path), hint="write it again with `chunkplan analyze` or `chunkplan build`")


def raise_if_unreadable(error: Exception) -> None:
    """Raise `error` again if it is one of the machine, not of the content of a file."""
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        raise error
