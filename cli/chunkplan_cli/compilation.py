"""Says why nothing seems to happen when the planner's loops are compiled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from chunkplan_cli.terminal import note

#: Seconds of silence that need no explanation.
PATIENCE = 2.0


@contextmanager
def note_compilation() -> Iterator[None]:
    """While the block runs: after some seconds, say so if it is compiling."""
    from chunkplan.compiled import has_compiled

    def explain() -> None:
        if has_compiled():
            note("compiling the planner's loops: half a minute, in the first run of each kind after an installation")

    timer = threading.Timer(PATIENCE, explain)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
