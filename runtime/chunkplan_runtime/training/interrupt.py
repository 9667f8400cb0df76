"""Ctrl-C in a run: the step at hand is finished first, and a checkpoint written; a second one stops the run at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from chunkplan_runtime.distributed.job import Job

_SAID = "\nstopping after this step, with a checkpoint; Ctrl-C again stops at once\n"


class Interrupt:
    """Takes one Ctrl-C of a block, once it is told to `defer`: `is_asked` is true then, which steps end with."""

    def __init__(self, job: Job) -> None:
        self.is_asked = False
        self._job = job

    def defer(self) -> None:
        """Take the next Ctrl-C, unless a handler that is not Python's does; threads get none."""
        is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not self.is_asked and is_pythons and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._ask)
            self._job.defers_interrupt(True)

    def __enter__(self) -> Interrupt:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if signal.getsignal(signal.SIGINT) == self._ask:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._job.defers_interrupt(False)
        if kind is None and self.is_asked:  # since the last step was done
            raise KeyboardInterrupt

    def _ask(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.is_asked = True
        if self._job.is_main:
            os.write(2, _SAID.encode())  # whatever Python's stderr is in the middle of
