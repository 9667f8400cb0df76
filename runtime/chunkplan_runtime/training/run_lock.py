"""One run at a time in a folder: a second one would write over the first one's lines."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from chunkplan.errors import UsageError


class RunLock:
    """A lock on the folder itself: nothing is left of it, however the process ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> None:
        """Hold the folder, if it is there and not held by this run already, and its file system has locks.

        Raises:
            UsageError: another run holds it.
        """
        if self._descriptor is not None or not self._path.is_dir():
            return
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise UsageError(
                f"another run is at work in {self._path}", hint="wait for it to end, or give another --output"
            ) from error
        except OSError:  # some network file systems have no locks on folders
            pass
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
