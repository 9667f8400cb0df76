"""Ports for the processes of a test to meet at."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A port that nobody listens at, for a process that is started later to listen at.

    It lies below those that Linux gives to sockets that ask for none (32768 and up): one of these may be taken by a
    process of another test before the port is used.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("", port))
            return port
