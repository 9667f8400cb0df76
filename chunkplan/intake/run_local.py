"""Runs tasks on this machine: in this process where there is little to do, else in several."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from chunkplan.errors import ChunkplanError
from chunkplan.files.writing import writing
from chunkplan.intake.disk import ROOM_HINT
from chunkplan.intake.pieces import Piece
from chunkplan.intake.process import IntakeSettings, prepare, process
from chunkplan.intake.result import PieceResult
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.worker import Worker, WorkerError, start

#: Tasks that wait beside those that run: so many that no process waits, so few that spooled pieces take little room.
_WAITING = 2


class Task(NamedTuple):
    """A piece to process, and how its records are laid out."""

    piece: Piece
    layout: RecordLayout


class Failed(NamedTuple):
    """The result of a task that ended in an error."""

    error: ChunkplanError


#: Called with bytes and tokens since the run began.
Report = Callable[[int, int], None]


def run_here(
    tasks: Iterator[Task], settings: IntakeSettings, report: Report
) -> Iterator[tuple[Task, PieceResult | Failed]]:
    """Do the tasks one after another in this process; ends after the first that fails."""
    done = [0, 0]

    def add(num_bytes: int, num_tokens: int) -> None:
        done[0] += num_bytes
        done[1] += num_tokens
        report(done[0], done[1])

    for task in tasks:
        outcome = attempt(settings, task, add)
        yield task, outcome
        if isinstance(outcome, Failed):
            return


class Workers:
    """Up to `num_workers` processes, which are started when they are asked for, and end with the block."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._started: list[Worker] = []
        self._idle: list[Worker] = []

    def begin(self, count: int, what: Prepare) -> None:
        """Start `count` processes before there is a task for them, which is less to wait for when there is.

        Raises:
            ChunkplanError: the system has no room for one.
        """
        with _named_errors():
            for _ in range(count):
                worker = self._start()
                worker.give(what)
                self._idle.append(worker)

    def take(self) -> Worker:
        """Take a process that has nothing to do; there are others than those that were taken and not put back."""
        return self._idle.pop() if self._idle else self._start()

    def put_back(self, worker: Worker) -> None:
        """Put back a process that has done its task."""
        self._idle.append(worker)

    def _start(self) -> Worker:
        self._started.append(start(_do))
        return self._started[-1]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._started:
            worker.end()
        self._started, self._idle = [], []


def run_in_processes(
    tasks: Iterator[Task], settings: IntakeSettings, report: Report, *, workers: Workers
) -> Iterator[tuple[Task, PieceResult | Failed]]:
    """Do the tasks in `workers`, in whichever order they end; none begins after one has failed.

    Raises:
        ChunkplanError: a process was killed.
    """
    with workers, _named_errors():
        yield from _run(tasks, settings, report, workers)


def _run(
    tasks: Iterator[Task], settings: IntakeSettings, report: Report, workers: Workers
) -> Iterator[tuple[Task, PieceResult | Failed]]:
    running: dict[Worker, Task] = {}
    waiting: deque[Task] = deque()
    failed: Task | None = None
    is_more, have_threads = True, False
    done = [0, 0]
    while True:
        room = workers.num_workers + _WAITING - len(running) - len(waiting)
        if is_more and failed is None and room > 0:
            following = next(tasks, None)
            is_more, room = following is not None, room - 1
            waiting.extend([following] if following else [])
        while waiting and failed is None and len(running) < workers.num_workers:
            worker = workers.take()
            running[worker] = waiting.popleft()
            worker.give(_Given(settings, running[worker]))
        # Of several failures the first in the input is reported: what comes after one is not waited for.
        if not any(failed is None or task.piece < failed.piece for task in running.values()):
            return
        if not is_more and not have_threads and len(running) < workers.num_workers:
            have_threads = True
            for worker in running:
                worker.give(Threads(workers.num_workers))
        can_go_on = is_more and failed is None and room > 0
        ready = wait([worker.connection for worker in running], timeout=0 if can_go_on else None)
        for worker in [worker for worker in running if worker.connection in ready]:
            message = worker.take()
            if isinstance(message, _Progress):
                done = [done[0] + message.num_bytes, done[1] + message.num_tokens]
                report(*done)
                continue
            task = running.pop(worker)
            workers.put_back(worker)
            if isinstance(message, Failed):
                failed = task if failed is None or task.piece < failed.piece else failed
            yield task, message


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except WorkerError as error:
        raise ChunkplanError(
            "a process that was reading data was killed or not started, most likely for want of memory",
            hint="use fewer processes with --workers; what was finished is not done again",
        ) from error


class Prepare(NamedTuple):
    """Given to a process before there is a task: what it loads meanwhile."""

    tokenizer: str | None
    chat_template: str | None
    today: str


class _Given(NamedTuple):
    """A task, given to a process."""

    settings: IntakeSettings
    task: Task


class Threads(NamedTuple):
    """Given to the last processes at work: the others have ended, so each may use so many threads."""

    num_threads: int


class _Progress(NamedTuple):
    """The bytes and tokens that a worker processed since its last message."""

    num_bytes: int
    num_tokens: int


def attempt(settings: IntakeSettings, task: Task, report: Callable[[int, int], None]) -> PieceResult | Failed:
    """Do one task; an error that a user can fix is returned, not raised."""
    try:
        with writing(settings.store, room_hint=ROOM_HINT):
            return process(settings, task.piece, task.layout, report)
    except ChunkplanError as error:
        return Failed(error)
    finally:
        if task.piece.is_temporary:
            Path(task.piece.path).unlink(missing_ok=True)


def _do(given: Prepare | _Given | Threads, send: Callable[[_Progress], None]) -> _Progress | PieceResult | Failed:
    """Do in a worker process what it was given, and `send` the progress of a task."""
    match given:
        case Prepare(tokenizer, chat_template, today):
            prepare(tokenizer, chat_template, today)
        case Threads(num_threads):
            os.environ |= {"RAYON_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "true"}
        case _Given(settings, task):
            return attempt(settings, task, lambda num_bytes, num_tokens: send(_Progress(num_bytes, num_tokens)))
    return _Progress(0, 0)
