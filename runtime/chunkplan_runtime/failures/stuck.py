"""Tells where a process is that has not moved for long: it may wait for another one that waits for it.

Nobody died then, so the watch has nothing to say, and what waits does so for an hour. Every process that is stuck says
where, and what all of them say together shows who waits for whom. A GPU whose memory is full looks like this too: torch
gives unused memory back before it gives up, and CUDA waits for the device to do so. Nothing is ended: a long action
looks the same.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chunkplan.quantities import seconds
from chunkplan.visible import one_line
from chunkplan_runtime.failures.silence import Silence

#: Seconds at the same point after which a process says so.
STUCK_AFTER = 300.0

_HINT = (
    "if no process moves, they wait for each other: look at what each of them says, and whether a GPU's memory is full "
    "(then --checkpointing or --kv-offload, or a smaller ChunkSize); the run ends by itself after an hour of it"
)


@contextmanager
def told_if_stuck(who: str, where: Callable[[], str], on_device: Callable[[], str | None]) -> Iterator[None]:
    """Within the block, if `where` says the same for `STUCK_AFTER` seconds, tell so on stderr, once for each place.

    `on_device`: what a GPU is at, as the host is ahead of it; None where there is none. It may wait for the device.
    """
    over = threading.Event()
    threading.Thread(
        target=_look, args=(who, where, on_device, over), name="look for what is stuck", daemon=True
    ).start()
    try:
        yield
    finally:
        over.set()


def _look(who: str, where: Callable[[], str], on_device: Callable[[], str | None], over: threading.Event) -> None:
    interval = STUCK_AFTER / 10
    silence = Silence(2 * interval)
    told = None
    while not over.wait(interval):
        silence.tick()
        place = where()
        if place == told or silence.of("place", place) < STUCK_AFTER:
            continue
        told = place
        _say(f"warning: {who} has not moved for {seconds(1e6 * STUCK_AFTER)}: {place}", f"hint: {_HINT}")
        device = on_device()
        if device is not None and not over.is_set():
            _say(f"warning: {who}: {device}")


def _say(*lines: str) -> None:
    sys.stderr.write("".join(f"{one_line(line)}\n" for line in lines))  # in one piece
    sys.stderr.flush()
