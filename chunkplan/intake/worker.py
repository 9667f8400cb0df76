"""Processes that do tasks: each has a pipe of its own and nothing that is shared, so one that is killed harms none.

They know nothing of the program that starts them: scripts without `if __name__ == "__main__":`, notebooks and what
comes from the standard input can have them. They ignore signals that are meant for the program, and end with it.
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

#: Signals that end a program are sent to all its processes; only the program acts on them.
_SIGNALS = {signal.SIGINT, signal.SIGTERM}

#: Does a task. It takes the task and a function that sends a message to the program, and returns the last message.
#: What the program gives it before that is done when the next message has been sent, and has no message of its own.
Do = Callable[[Any, Callable[[Any], None]], Any]


class WorkerError(Exception):
    """A worker was killed, or the system has no room for one."""


@dataclass(frozen=True, eq=False)
class Worker:
    """A process that waits for tasks."""

    process: SpawnProcess
    connection: Connection

    def give(self, task: Any) -> None:
        """Send it a task to do.

        Raises:
            WorkerError: it was killed.
        """
        try:
            self.connection.send(task)
        except OSError as error:
            raise WorkerError from error

    def take(self) -> Any:
        """Wait for its next message; what the task raised is raised here.

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
        """Kill the process, whatever it is doing, and wait until it has ended."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def start(do: Do) -> Worker:
    """Start a process in which `do` does the tasks that it is given.

    Raises:
        WorkerError: the system has no room for it.
    """
    context = multiprocessing.get_context("spawn")
    try:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, do), daemon=True)
        resource_tracker.ensure_running()  # starting it later would unblock signals
        with _blocked_signals(), _without_main():
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

    def receive() -> Any:
        with _ended_with_the_program():
            return connection.recv()

    def send(message: Any) -> None:
        with _ended_with_the_program():
            connection.send(message)
        while connection.poll():
            do(receive(), send)

    while True:
        task = receive()
        try:
            message = do(task, send)
        except Exception as error:
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            message = _Raised(error)
        with _ended_with_the_program():
            connection.send(message)


@contextmanager
def _ended_with_the_program() -> Iterator[None]:
    """End this process without a word where the program turns out to be gone in the block."""
    try:
        yield
    except (EOFError, ConnectionError):
        os._exit(1)


def _end_with_parent() -> None:
    """End this process when the program has ended: one that was killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Processes that are started in the block never get the `_SIGNALS`; this one gets them after the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_main() -> Iterator[None]:
    """Processes that are started in the block do not import the main module, which may be a script without a guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
