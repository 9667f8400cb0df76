"""The files of a plan or an analysis are its own: nothing is read that its folder only points at."""

from __future__ import annotations

from pathlib import Path

from chunkplan.errors import DataError


def refuse_outside(path: Path, folder: Path) -> None:
    """Refuse a file of `folder` that is a link out of it, or no regular file: a pipe would be waited for without end.

    The folder itself may be a link, and links within it are followed.

    Raises:
        DataError: it is one of these, or not there.
    """
    target = path.resolve()
    if not target.is_relative_to(folder.resolve()):
        raise DataError(
            f"a link to {target}, outside of its folder",
            where=str(path),
            hint="if you trust it, copy the folder with what its links point at: cp -rL",
        )
    if not target.is_file():
        what = "not a regular file" if target.exists() else "missing"
        raise DataError(what, where=str(path), hint="write it again with `chunkplan analyze` or `chunkplan build`")
