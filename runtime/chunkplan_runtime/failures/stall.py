"""Notices what does not move: how long values have stayed the same, and a warning that says where a process stalls.

A process that stalls may wait for another one that waits for it. Nobody died then, so the watchdog has nothing to
report, and what waits does so for an hour. Every process that is stalled prints where, and what all of them print
together shows who waits for whom. A GPU whose memory is full looks like this too: torch gives unused memory back before
it gives up, and CUDA waits for the device to do so. Nothing is ended: a long action looks the same.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from chunkplan.quantities import seconds
from chunkplan.visible import one_line

#: Seconds at the same point after which a process prints where it is.
STALLED_AFTER = 300.0

_HINT = (
    "if no process moves, they wait for each other: look at what each of them says, and whether a GPU's memory is full "
    "(then --checkpointing full or --kv-offload, or a smaller ChunkSize); the run ends by itself after an hour of it"
)


class StallClock:
    """Measures, in seconds, how long values have stayed the same.

    At most `longest` seconds count between two calls of `tick`: what passes while this process itself is suspended,
    alone or with the whole job, does not count against the others.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._now = 0.0
        self._ticked = time.monotonic()
        self._pause, self._pause_ended = 0.0, -math.inf
        self._since: dict[Hashable, tuple[object, float]] = {}

    def tick(self) -> None:
        """Let the time pass that has passed since the last call."""
        now = time.monotonic()
        passed = now - self._ticked
        self._now += min(passed, self._longest)
        self._ticked = now
        if passed > self._longest:
            self._pause, self._pause_ended = passed, self._now

    def seconds(self, key: Hashable, value: object) -> float:
        """How many seconds `key` has had this value; 0 where it is new."""
        if key not in self._since or self._since[key][0] != value:
            self._since[key] = value, self._now
        return self._now - self._since[key][1]

    def has_paused(self, seconds: float) -> bool:
        """Whether this process itself was suspended for so long or longer, until twice as long ago at the most."""
        return self._pause >= seconds and self._now - self._pause_ended <= 2 * seconds


@contextmanager
def warned_of_stall(who: str, where: Callable[[], str], on_device: Callable[[], str | None]) -> Iterator[None]:
    """Within the block, if `where` gives the same for `STALLED_AFTER` seconds, warn on stderr, once for each place.

    `on_device` gives what a GPU is at, as the host is ahead of it; None where there is none. It may wait for the
    device.
    """
    over = threading.Event()
    threading.Thread(target=_look, args=(who, where, on_device, over), name="look for a stall", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _look(who: str, where: Callable[[], str], on_device: Callable[[], str | None], over: threading.Event) -> None:
    interval = STALLED_AFTER / 10
    clock = StallClock(2 * interval)
    warned = None
    while not over.wait(interval):
        clock.tick()
        place = where()
        if place == warned or clock.seconds("place", place) < STALLED_AFTER:
            continue
        warned = place
        _print(f"warning: {who} has not moved for {seconds(1e6 * STALLED_AFTER)}: {place}", f"hint: {_HINT}")
        device = on_device()
        if device is not None and not over.is_set():
            _print(f"warning: {who}: {device}")


def _print(*lines: str) -> None:
    sys.stderr.write("".join(f"{one_line(line)}\n" for line in lines))  # in one piece
    sys.stderr.flush()
