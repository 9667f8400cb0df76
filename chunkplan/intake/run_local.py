"""Runs tasks on this machine: in this process where there is little to do, else in several."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from chunkplan.errors import ChunkplanError
from chunkplan.files.writing import writing
from chunkplan.intake.disk import ROOM_HINT
from chunkplan.intake.pieces import Piece
from chunkplan.intake.process import IntakeSettings, process
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


def run_in_processes(
    tasks: Iterator[Task], settings: IntakeSettings, report: Report, *, num_workers: int
) -> Iterator[tuple[Task, PieceResult | Failed]]:
    """Do the tasks in `num_workers` processes, in whichever order they end; none begins after one has failed.

    Raises:
        ChunkplanError: a process was killed.
    """
    do = partial(_do, settings)
    workers: list[Worker] = []
    idle: list[Worker] = []
    running: dict[Worker, Task] = {}
    waiting: deque[Task] = deque()
    failed: Task | None = None
    is_more = True
    done = [0, 0]
    try:
        while True:
            room = num_workers + _WAITING - len(running) - len(waiting)
            if is_more and failed is None and room > 0:
                following = next(tasks, None)
                is_more, room = following is not None, room - 1
                waiting.extend([following] if following else [])
            while waiting and failed is None and len(running) < num_workers:
                if not idle:
                    workers.append(start(do))
                    idle.append(workers[-1])
                worker = idle.pop()
                running[worker] = waiting.popleft()
                worker.give(running[worker])
            # Of several failures the first in the input is reported: what comes after one is not waited for.
            if not any(failed is None or task.piece < failed.piece for task in running.values()):
                return
            can_go_on = is_more and failed is None and room > 0
            ready = wait([worker.connection for worker in running], timeout=0 if can_go_on else None)
            for worker in [worker for worker in running if worker.connection in ready]:
                message = worker.take()
                if isinstance(message, _Progress):
                    done = [done[0] + message.num_bytes, done[1] + message.num_tokens]
                    report(*done)
                    continue
                task = running.pop(worker)
                idle.append(worker)
                if isinstance(message, Failed):
                    failed = task if failed is None or task.piece < failed.piece else failed
                yield task, message
    except WorkerError as error:
        raise ChunkplanError(
            "a process that was reading data was killed or not started, most likely for want of memory",
            hint="use fewer processes with --workers; what was finished is not done again",
        ) from error
    finally:
        for worker in workers:
            worker.end()


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


def _do(settings: IntakeSettings, task: Task, send: Callable[[_Progress], None]) -> PieceResult | Failed:
    """Do a task in a worker process, and `send` its progress."""
    return attempt(settings, task, lambda num_bytes, num_tokens: send(_Progress(num_bytes, num_tokens)))
