"""Signals that end a process, noticed while its main thread is in C++, where no handler of Python runs."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable


class SignalListener:
    """A thread that calls `on_signal` once, when this process gets its first SIGTERM or SIGINT.

    The handlers of Python stay as they are: the number of each signal comes through a pair of sockets besides.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)

    def start(self) -> None:
        """Begin to listen; only the main thread may call it."""
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="watchdog of signals", daemon=True).start()

    def stop(self) -> None:
        """Take no further signals; only the main thread may call it."""
        signal.set_wakeup_fd(-1)

    def _listen(self) -> None:
        while self._receiver.recv(1)[0] not in (signal.SIGTERM, signal.SIGINT):
            pass
        self._on_signal()
