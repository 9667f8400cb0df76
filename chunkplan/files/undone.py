"""What must not stay behind is undone, whether its block ends or the process does in the middle of it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

_undoings: dict[object, Callable[[], None]] = {}

#: Held while something is made that is undone later, while it is undone, and where half of a change is none; for good
#: by who ends the process.
changing = threading.RLock()


@contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Call `undo` when the block ends, or `end_process` ends the process in it.

    What may be there only if it is undone is made, and the block begun, while `changing` is held.
    """
    key = object()
    _undoings[key] = undo
    try:
        yield
    finally:
        with changing:
            del _undoings[key]
            undo()


def end_process(code: int, last_words: str = "") -> NoReturn:
    """End the process from any thread, whatever the others are doing: all is undone, and no word follows the last."""
    changing.acquire()
    for undo in reversed(_undoings.values()):
        with suppress(Exception):
            undo()
    said = sys.stderr
    with suppress(Exception):
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (until the process ends)
        print(end=last_words, file=said, flush=True)
    os._exit(code)
