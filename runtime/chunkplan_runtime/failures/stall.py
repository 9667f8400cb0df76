"""Says where a process has not moved for long, which nobody ends: processes may wait for each other for an hour."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chunkplan.quantities import seconds
from chunkplan.visible import one_line

#: Seconds at the same point after which a process prints where it is.
STALLED_AFTER = 300.0

_HINT = (
    "if no process moves, they wait for each other: look at what each of them says, and whether a GPU's memory is full "
    "(then --checkpointing full or --kv-offload, or a smaller ChunkSize); the run ends by itself after an hour of it"
)


@contextmanager
def warned_of_stall(who: str, where: Callable[[], str], on_device: Callable[[], str | None]) -> Iterator[None]:
    """Within the block, if `where` gives the same for `STALLED_AFTER` seconds, warn on stderr.

    `on_device` gives what a GPU is at, as the host is ahead of it; None where there is none. It may wait for the
    device.
    """
    over = threading.Event()

    def look() -> None:
        last, looks = "", 0
        while not over.wait(STALLED_AFTER / 10):  # looks are counted, as a suspended process does not look
            point = where()
            last, looks = point, looks + 1 if point == last else 0
            if looks == 10:
                _print(f"warning: {who} has not moved for {seconds(1e6 * STALLED_AFTER)}: {point}", f"hint: {_HINT}")
                device = on_device()
                if device is not None and not over.is_set():
                    _print(f"warning: {who}: {device}")

    threading.Thread(target=look, name="look for a stall", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _print(*lines: str) -> None:
    sys.stderr.write("".join(f"{one_line(line)}\n" for line in lines))  # in one piece
    sys.stderr.flush()
