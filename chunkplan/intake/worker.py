"""Processes that do tasks: each has a pipe of its own and nothing that is shared, so one that is killed harms none.

They know nothing of the program that starts them: scripts without `if __name__ == "__main__":`, notebooks and what
comes from the standard input can have them. They do not hear signals that are meant for the program, and end with it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import ModuleType
from typing import Any

#: What ends a program is told to all its processes, and is for the program to act on.
_SIGNALS = {signal.SIGINT, signal.SIGTERM}

#: Does a task: what it is given, and a function that sends a message to the program -> the last message.
Do = Callable[[Any, Callable[[Any], None]], Any]


class WorkerError(Exception):
    """A worker was killed, or the system has no room for one."""


@dataclass(frozen=True, eq=False)
class Worker:
    """A process that waits for tasks."""

    process: SpawnProcess
    connection: Connection

    def give(self, task: Any) -> None:
        """Have it do a task.

        Raises:
            WorkerError: it was killed.
        """
        try:
            self.connection.send(task)
        except OSError as error:
            raise WorkerError from error

    def take(self) -> Any:
        """The next message; raises what the task raises.

        Raises:
            WorkerError: it was killed.
        """
        try:
            message = self.connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerError from error
        if isinstance(message, _Raised):
            raise message.error
        return message

    def end(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def start(do: Do) -> Worker:
    """A new process, in which `do` does the tasks that it is given.

    Raises:
        WorkerError: the system has no room for it.
    """
    context = multiprocessing.get_context("spawn")
    try:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, do), daemon=True)
        resource_tracker.ensure_running()  # it would make processes hear again when it is started
        with _deaf(), _without_main():
            process.start()
    except OSError as error:
        raise WorkerError from error
    theirs.close()
    return Worker(process, ours)


@dataclass(frozen=True)
class _Raised:
    error: Exception


def _work(connection: Connection, do: Do) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for every core
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            message = do(task, connection.send)
        except BrokenPipeError:  # the program is gone
            os._exit(1)
        except Exception as error:
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            message = _Raised(error)
        connection.send(message)


def _end_with_parent() -> None:
    """A program that was killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started within never hear of what ends the program, which hears of it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_main() -> Iterator[None]:
    """Processes that are started within do not import the main module: it may do all it does as it is imported."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
