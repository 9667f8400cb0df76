"""Reads ahead: makes the next items of an iteration in a thread while the caller works on the last one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

#: An item, or what the thread ended with: StopIteration or an error.
_Ready = SimpleQueue[tuple[T | None, BaseException | None]]


class ReadAhead(Generic[T]):
    """Iterates over `items` with up to `depth` of them made ahead.

    An error is raised where its item would have come. The thread ends with the items, an error, `close`, when this is
    garbage collected and when the interpreter exits, whichever is first; what it is making then is waited for.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._ready: _Ready[T] = SimpleQueue()
        # An entry for each item that may be made. Queues, not semaphores: the garbage collector may come to `_end` in
        # the middle of anything, and putting something into a SimpleQueue is safe even in the middle of getting it.
        self._room: SimpleQueue[None] = SimpleQueue()
        for _ in range(depth):
            self._room.put(None)
        stop = threading.Event()
        # The thread knows nothing of `self`, which could not be collected otherwise.
        thread = threading.Thread(
            target=_read, args=(items, self._ready, self._room, stop), name="chunkplan-read-ahead", daemon=True
        )
        thread.start()
        self._finalizer = weakref.finalize(self, _end, thread, self._room, stop)

    def __iter__(self) -> ReadAhead[T]:
        return self

    def __next__(self) -> T:
        if not self._finalizer.alive:
            raise StopIteration
        item, error = self._ready.get()
        if error is not None:
            self.close()
            raise error
        self._room.put(None)
        return item  # type: ignore[return-value]  # without an error there is an item

    def close(self) -> None:
        """End the thread; there are no more items."""
        self._finalizer()


def _read(items: Iterator[T], ready: _Ready[T], room: SimpleQueue[None], stop: threading.Event) -> None:
    while True:
        room.get()
        if stop.is_set():
            return
        try:
            ready.put((next(items), None))
        except BaseException as error:  # whatever it is, the caller has to see it
            ready.put((None, error))
            return


def _end(thread: threading.Thread, room: SimpleQueue[None], stop: threading.Event) -> None:
    stop.set()
    room.put(None)
    if thread is not threading.current_thread():  # where the garbage collector happens to run
        thread.join()
