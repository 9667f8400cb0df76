"""How the job ends: whoever finds that it has to writes a verdict into the store, once, and all who read it end."""

from __future__ import annotations

import os
import sys
import threading
import time

from torch.distributed.distributed_c10d import Store

from chunkplan.errors import ChunkplanError
from chunkplan.visible import one_line

#: The key of the verdict in the store: "<exit code> <process that found it>", empty while there is none.
_KEY = "verdict"


class Verdict:
    """The end of the job, as this process knows it.

    Where `main_thread_ends` is set the main thread prints `error` and ends the process; else `settle` does both, also
    while the main thread is blocked in C++. `grace` is how many seconds others then have to read the verdict.
    """

    def __init__(self, store: Store, process: int, grace: float) -> None:
        self.main_thread_ends = False
        self.is_first = True  # no other process has reported an end
        self.error: ChunkplanError | None = None  # what the main thread has to print
        self.settled = threading.Event()  # how the job ends is known, or nothing looks for it any more
        self._settling = threading.Lock()
        self._store = store
        self._process = process
        self._grace = grace

    def prepare(self) -> None:
        """Make the key: reading waits for keys that are not there.

        Raises:
            RuntimeError: the store is gone.
        """
        self._store.compare_set(_KEY, "", "")

    def look(self) -> None:
        """Settle the end if another process has written a verdict.

        Raises:
            RuntimeError: the store is gone.
        """
        written = self._store.get(_KEY)
        if written:
            self.settle(_code_of(written), None, is_first=False)

    def write(self, code: int) -> tuple[int, bool]:
        """Write a verdict, unless there is one; returns the exit code that holds and whether this process wrote it.

        Raises:
            RuntimeError: the store is gone.
        """
        own = f"{code} {self._process}"
        written = self._store.compare_set(_KEY, "", own)
        return _code_of(written), written == own.encode()

    def settle(self, code: int, error: ChunkplanError | None, *, is_first: bool) -> None:
        """The job ends with this exit code, and with it this process, unless its main thread is at it.

        `error` is printed; None where another process prints it. The first call counts, later ones do nothing.
        """
        with self._settling:
            if self.settled.is_set():
                return
            main_thread_ends = self.main_thread_ends
            self.is_first = is_first and main_thread_ends
            self.error = error if main_thread_ends else None
            self.settled.set()
        if main_thread_ends:
            return
        if error is not None:
            sys.stderr.write(f"error: {one_line(str(error))}\nhint: {error.hint}\n")  # in one piece
        time.sleep(self._grace)  # others read the verdict; a process that fails too may end by itself
        sys.stderr.flush()
        os._exit(code)


def _code_of(verdict: bytes) -> int:
    return int(verdict.split()[0])
