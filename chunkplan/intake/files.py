"""Input files wherever they are: local paths, and URLs such as s3:// through fsspec (the extra `remote`)."""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.extras import pip_install

#: Stands for the standard input.
STDIN = "-"


class Files:
    """Files of this machine. Paths are whole: what a method returns can be given to another, and to `open_file`."""

    def exists(self, path: str) -> bool:
        """True if there is a file or a folder at `path`."""
        return Path(path).exists()

    def is_folder(self, path: str) -> bool:
        """True if `path` is a folder."""
        return Path(path).is_dir()

    def is_folder_link(self, path: str) -> bool:
        """True if `path` is a symbolic link to a folder."""
        return Path(path).is_symlink() and Path(path).is_dir()

    def children(self, folder: str) -> tuple[list[str], list[str]]:
        """The files and the folders directly in `folder`; hidden folders are left out.

        Links are what they lead to, and files if they lead nowhere.
        """
        files, folders = [], []
        for path in Path(folder).iterdir():
            try:
                mode = path.stat().st_mode
            except OSError:
                mode = stat.S_IFREG
            if stat.S_ISREG(mode):
                files.append(str(path))
            elif stat.S_ISDIR(mode) and not path.name.startswith("."):
                folders.append(str(path))
        return files, folders

    def matches(self, pattern: str) -> list[str]:
        """Sorted paths that match a pattern with `*`, `?`, `[` and `**`, without hidden files and folders."""
        return sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 (Path.glob takes no absolute patterns)

    def size(self, path: str) -> int | None:
        """The bytes of a file, or None where they are not known before it is read (pipes)."""
        return Path(path).stat().st_size if Path(path).is_file() else None

    def damage(self, path: str) -> str | None:
        """Return why a path found in a folder or by a pattern cannot be opened, None if it can."""
        try:
            Path(path).stat()
        except OSError as error:
            known = {errno.ENOENT: "a link that leads nowhere", errno.ELOOP: "a link that leads to itself"}
            return known.get(error.errno or 0, f"it cannot be looked at: {error.strerror}")
        return None if os.access(path, os.R_OK) else "there is no permission to read it"


class _RemoteFiles(Files):
    """Files of one filesystem of fsspec. There are no links, and only reading shows damage."""

    def __init__(self, system: Any) -> None:
        self._system = system

    def exists(self, path: str) -> bool:
        return self._type(path) is not None

    def is_folder(self, path: str) -> bool:
        return self._type(path) == "directory"

    def _type(self, path: str) -> str | None:
        """ "file", "directory" or None; `exists` and `isdir` of http would fetch the file, so `info` is called."""
        try:
            return str(self._system.info(path)["type"])
        except FileNotFoundError:
            return None

    def is_folder_link(self, path: str) -> bool:
        return False

    def children(self, folder: str) -> tuple[list[str], list[str]]:
        itself = self._system.unstrip_protocol(folder).rstrip("/")  # object stores may list a folder in itself
        found: dict[str, list[str]] = {"file": [], "directory": []}
        for entry in self._system.ls(folder, detail=True):
            path = self._system.unstrip_protocol(entry["name"].rstrip("/"))
            if path != itself and entry["type"] in found:
                found[entry["type"]].append(path)
        return found["file"], [path for path in found["directory"] if not name_of(path).startswith(".")]

    def matches(self, pattern: str) -> list[str]:
        named = len(re.split(r"[*?\[]", self._system._strip_protocol(pattern))[0].rpartition("/")[0])
        found = [path for path in self._system.glob(pattern) if "/." not in path[named:]]
        return sorted(map(self._system.unstrip_protocol, found))

    def size(self, path: str) -> int | None:
        return cast("int | None", self._system.size(path))

    def damage(self, path: str) -> str | None:
        return None


def is_url(path: str) -> bool:
    """True for a URL, which fsspec opens."""
    return "://" in path


def name_of(path: str) -> str:
    """The last part of a path or URL."""
    return path.rstrip("/").rpartition("/")[2]


def join(folder: str, name: str) -> str:
    """The path of `name` in `folder`."""
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else str(Path(folder) / name)


def files_of(path: str) -> Files:
    """Return the file system that `path` is on.

    Raises UsageError: a URL whose protocol needs something that is not installed, or that fsspec does not know.
    """
    return _RemoteFiles(_filesystem(path)) if is_url(path) else Files()


def open_file(path: str, block_bytes: int | None = None) -> BinaryIO:
    """The bytes of a file, a URL, or the standard input, from their begin; use it within `reading`.

    `block_bytes`: bytes to fetch at once from a URL, if these are to be few.
    """
    if path == STDIN:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    if not is_url(path):
        return Path(path).open("rb")
    block_size = {} if block_bytes is None else {"block_size": block_bytes}
    return cast(BinaryIO, _filesystem(path).open(path, "rb", **block_size))


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns what the system, or whoever serves a URL, has against reading `path` into a UsageError."""
    try:
        yield
    except ChunkplanError:
        raise
    except OSError as error:
        hint = "check the address, and your access to it" if is_url(path) else "check the path and its permissions"
        raise UsageError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error
    except Exception as error:
        if not is_url(path):
            raise
        raise UsageError(  # every protocol has errors of its own
            f"cannot read {path}: {type(error).__name__}: {error}", hint="check the address, and your access to it"
        ) from error


def _filesystem(url: str) -> Any:
    try:
        import fsspec
    except ImportError as error:
        raise UsageError(f"{url} is a URL, which needs fsspec", hint=pip_install("remote")) from error
    try:
        return fsspec.core.url_to_fs(url)[0]
    except ImportError as error:
        protocol = url.partition("://")[0]
        package = getattr(error.__cause__, "name", None) or "the package it names"
        raise UsageError(f"no access to {protocol}:// ({error})", hint=f"pip install {package}") from error
    except ValueError as error:
        raise UsageError(f"{url} is no address: {error}", hint="give s3://, gs://, hf://, ... or a path") from error
