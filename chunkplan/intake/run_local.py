"""Runs tasks on this machine: in this process where there is little to do, else in several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from chunkplan.errors import ChunkplanError
from chunkplan.intake.pieces import Piece
from chunkplan.intake.process import Job, process
from chunkplan.intake.result import PieceResult
from chunkplan.intake.schemas import Layout

#: Tasks that wait beside those that run: enough that no process has to, few enough that spooled pieces take no room.
_WAITING = 2

#: Seconds between two looks at how far the tasks have come.
_LOOK_EVERY = 0.25

#: Bytes and tokens, as one message of a pipe.
_PROGRESS = struct.Struct("<qq")


class Task(NamedTuple):
    """A piece to process, and how its records are laid out."""

    piece: Piece
    layout: Layout


class Failed(NamedTuple):
    """A task that came to nothing."""

    error: ChunkplanError


#: Called with bytes and tokens since the run began.
Report = Callable[[int, int], None]


def run_here(tasks: Iterator[Task], job: Job, report: Report) -> Iterator[tuple[Task, PieceResult | Failed]]:
    """Do the tasks one after another in this process; ends after the first that fails."""
    done = [0, 0]

    def add(num_bytes: int, num_tokens: int) -> None:
        done[0] += num_bytes
        done[1] += num_tokens
        report(done[0], done[1])

    for task in tasks:
        outcome = attempt(job, task, add)
        yield task, outcome
        if isinstance(outcome, Failed):
            return


def run_in_processes(
    tasks: Iterator[Task], job: Job, report: Report, *, num_workers: int
) -> Iterator[tuple[Task, PieceResult | Failed]]:
    """Do the tasks in `num_workers` processes, in whichever order they end; none begins after one has failed.

    Raises:
        ChunkplanError: a process was killed.
    """
    context = multiprocessing.get_context("spawn")
    # A pipe and no lock: a process that is killed while it holds a lock never gives it back.
    receiver, sender = context.Pipe(duplex=False)
    done = [0, 0]

    def look() -> None:
        while receiver.poll():
            for index, value in enumerate(_PROGRESS.unpack(receiver.recv_bytes())):
                done[index] += value
        report(done[0], done[1])

    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num_workers, context, _start, (sender,))
    running: dict[Future[PieceResult | Failed], Task] = {}
    failed: Task | None = None
    try:
        while True:
            for task in islice(tasks, 0 if failed else num_workers + _WAITING - len(running)):
                running[_submit(pool, job, task)] = task
            # Of several failures the first in the input is reported: what comes after one is not waited for.
            if not any(failed is None or task.piece < failed.piece for task in running.values()):
                break
            ended, _ = wait(running, timeout=_LOOK_EVERY, return_when=FIRST_COMPLETED)
            look()
            for future in ended:
                task, outcome = running.pop(future), future.result()
                if isinstance(outcome, Failed):
                    failed = task if failed is None or task.piece < failed.piece else failed
                yield task, outcome
        look()
        if running:
            _terminate(others)
    except (BrokenProcessPool, _NotStartedError) as error:
        _terminate(others)  # the pool misses those that were just starting, and would wait for them
        raise ChunkplanError(
            "a process that was reading data was killed or not started, most likely for want of memory",
            hint="use fewer processes with --workers; what was finished is not done again",
        ) from error
    except BaseException:  # an interrupt must not wait for pieces to be finished
        _terminate(others)
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        receiver.close()
        sender.close()


class _NotStartedError(Exception):
    """The system has no room for another process, or one was killed while another was started."""


def _submit(pool: ProcessPoolExecutor, job: Job, task: Task) -> Future[PieceResult | Failed]:
    try:
        return pool.submit(_attempt, job, task)
    except OSError as error:
        raise _NotStartedError from error


def _terminate(others: set[Any]) -> None:
    for child in set(multiprocessing.active_children()) - others:
        child.terminate()


def attempt(job: Job, task: Task, report: Callable[[int, int], None]) -> PieceResult | Failed:
    """Do one task; what a user can mend comes back as a value."""
    try:
        return process(job, task.piece, task.layout, report)
    except ChunkplanError as error:
        return Failed(error)
    finally:
        if task.piece.is_temporary:
            Path(task.piece.path).unlink(missing_ok=True)


_sender: Any = None  # in a worker process: where it says how far it has come


def _start(sender: Any) -> None:
    """Prepare a worker process."""
    global _sender
    _sender = sender
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for every core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told of it, and ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _attempt(job: Job, task: Task) -> PieceResult | Failed:
    def add(num_bytes: int, num_tokens: int) -> None:
        _sender.send_bytes(_PROGRESS.pack(num_bytes, num_tokens))

    return attempt(job, task, add)
