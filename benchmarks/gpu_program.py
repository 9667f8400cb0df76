"""Runs a program that ends no later than who runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Seconds that a program has to end those that it started; torchrun takes up to 30.
_TO_END = 40


def lines_of(words: Sequence[str], *, seconds: float = threading.TIMEOUT_MAX, **more: Any) -> Iterator[str]:
    """Run a program, and yield the lines that it prints as they come; `more` as in `subprocess.Popen`.

    It is ended, with what it started, after `seconds`, and where no more of its lines are taken.

    Raises:
        RuntimeError: it failed, or took longer.
    """
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **more
    ) as program:
        is_over = threading.Event()

        def end() -> None:
            is_over.set()
            _end(program)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            assert program.stdout is not None
            yield from program.stdout
            program.wait()
        finally:
            timer.cancel()
            _end(program)
    if program.returncode:
        code = f"exit code {program.returncode}"
        raise RuntimeError(f"not done after {seconds:g} s" if is_over.is_set() else code)


def _end(program: subprocess.Popen[str]) -> None:
    started = _started_by(program.pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if program.poll() is None:
                os.killpg(program.pid, number)
                program.wait(_TO_END)
    for pid in started:  # torchrun leaves those that it is just starting, each in a session of its own
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _started_by(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(each) for each in file.read_text().split()]
    return found + [below for each in found for below in _started_by(each)]
