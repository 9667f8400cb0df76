"""Runs tasks: in this process where there is little to do, in several of this machine, or on a Ray cluster.

Processes of this machine know nothing of the program that starts them: scripts without `if __name__ == "__main__":`,
notebooks and what comes from the standard input can have them. They ignore signals that are meant for the program, and
end with it. On a cluster, sources and store have to lie where every machine finds them under the same path.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple, cast

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.extras import pip_install
from chunkplan.files.writing import writing
from chunkplan.intake.pieces import Piece, PieceResult
from chunkplan.intake.process import IntakeSettings, prepare, process
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.store import ROOM_HINT

#: Tasks that wait beside those that run: so many that nobody waits for one, so few that spooled pieces take little
#: room. On a cluster it is as many for each CPU.
_WAITING = 2

#: Seconds between looks at the progress.
_SECONDS = 0.1

_SECONDS_TO_CONNECT = 5.0

#: Signals that end a program are sent to all its processes; only the program acts on them.
_SIGNALS = {signal.SIGINT, signal.SIGTERM}

#: Value of `--ray` for a cluster that is started on this machine.
LOCAL = "local"


class Task(NamedTuple):
    """A piece to process, and how its records are laid out."""

    piece: Piece
    layout: RecordLayout


#: Called with bytes and tokens since the last call.
Report = Callable[[int, int], None]

#: The result of each task, in the order in which they end: an error ends the run, and no task begins after it.
Outcomes = Iterator[tuple[Task, PieceResult | ChunkplanError]]

#: The outcome of a task, and its bytes and tokens that have not been reported.
_TaskResult = tuple[PieceResult | ChunkplanError, int, int]


def run_here(tasks: Iterator[Task], settings: IntakeSettings, report: Report) -> Outcomes:
    """Run the tasks one after another in this process, up to the first that fails."""
    for task in tasks:
        outcome = _attempt(settings, task, report)
        yield task, outcome
        if isinstance(outcome, ChunkplanError):
            return


def _attempt(settings: IntakeSettings, task: Task, report: Report) -> PieceResult | ChunkplanError:
    """Run one task; an error that a user can fix is returned, not raised."""
    try:
        with writing(settings.store, room_hint=ROOM_HINT):
            return process(settings, task.piece, task.layout, report)
    except ChunkplanError as error:
        return error
    finally:
        if task.piece.is_temporary:
            Path(task.piece.path).unlink(missing_ok=True)


def _run(
    tasks: Iterator[Task],
    running: dict[Future[_TaskResult], Task],
    submit: Callable[[Task], Future[_TaskResult]],
    most: Callable[[], int],
    look: Callable[[bool], None],
    report: Report,
) -> Outcomes:
    """Submit tasks with `submit`, at most `most()` at once; `running` is kept up to date.

    `look` is called now and then, with whether there are more tasks.
    """
    failed: Task | None = None
    is_more = True
    while True:
        while is_more and failed is None and len(running) < most():
            task = next(tasks, None)
            is_more = task is not None
            if task is not None:
                running[submit(task)] = task
        # Of several failures the first in the input is reported: what comes after one is not waited for.
        if not any(failed is None or task.piece < failed.piece for task in running.values()):
            return
        done, _ = wait(running, _SECONDS, FIRST_COMPLETED)
        look(is_more)
        for future in done:
            task = running.pop(future)
            outcome, num_bytes, num_tokens = future.result()
            report(num_bytes, num_tokens)
            if isinstance(outcome, ChunkplanError) and (failed is None or task.piece < failed.piece):
                failed = task
            yield task, outcome


class Workers:
    """Up to `num_workers` processes, which are started when they are needed, and end with the block.

    Each begins with loading the tokenizer, if there is one.
    """

    def __init__(self, num_workers: int, tokenizer: str | None, chat_template: str | None, today: str) -> None:
        self.num_workers = num_workers
        context = multiprocessing.get_context("spawn")
        self._progress = context.SimpleQueue()
        self.num_threads = context.RawValue("i", 0)
        self._pool = ProcessPoolExecutor(
            num_workers,
            context,
            initializer=_begin_worker,
            initargs=(self._progress, self.num_threads, tokenizer, chat_template, today),
        )
        self._processes = self._pool._processes

    def start(self, count: int) -> None:
        """Start `count` processes before there is a task for them, which is less to wait for when there is."""
        for _ in range(count):
            self.submit(int)  # which does nothing

    def submit(self, do: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Submit a call to a worker process.

        Raises ChunkplanError: a process was killed, or the system has no room for one.
        """
        resource_tracker.ensure_running()  # starting it later would unblock signals
        with _named_errors(BrokenProcessPool, OSError), _detached():
            return self._pool.submit(do, *arguments)

    def progress(self) -> Iterator[tuple[int, int]]:
        """The bytes and tokens that processes reported since it was asked for."""
        while not self._progress.empty():
            yield self._progress.get()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in list((self._processes or {}).values()):
            worker.kill()
        self._pool.shutdown(cancel_futures=True)


def run_in_processes(tasks: Iterator[Task], settings: IntakeSettings, report: Report, *, workers: Workers) -> Outcomes:
    """Run the tasks in `workers`, in any order; after one has failed no other starts.

    Raises ChunkplanError: a process was killed.
    """
    running: dict[Future[_TaskResult], Task] = {}

    def look(is_more: bool) -> None:
        for num_bytes, num_tokens in workers.progress():
            report(num_bytes, num_tokens)
        if not is_more and len(running) < workers.num_workers:  # the others have ended, so each may use more threads
            workers.num_threads.value = workers.num_workers

    with workers, _named_errors(BrokenProcessPool):
        submit, most = partial(workers.submit, _run_task, settings), workers.num_workers + _WAITING
        yield from _run(tasks, running, submit, lambda: most, look, report)


@contextmanager
def _named_errors(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        raise ChunkplanError(
            "a process that was reading data was killed or not started, most likely for want of memory",
            hint="use fewer processes with --workers; what was finished is not done again",
        ) from error


@contextmanager
def _detached() -> Iterator[None]:
    """Processes that are started in the block never get the `_SIGNALS`, which this one gets after the block.

    They do not import the main module, which may be a script without a guard.
    """
    before, main = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS), sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


#: In a worker process: where it reports progress, and how many threads it may use if it is one of the last.
_shared: tuple[Any, Any]


def _begin_worker(progress: Any, num_threads: Any, *loaded: Any) -> None:
    global _shared
    _shared = progress, num_threads
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for every core
    threading.Thread(target=_end_with_parent, daemon=True).start()
    prepare(*loaded)


def _end_with_parent() -> None:
    """End this process when the program has ended: one that was killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_task(settings: IntakeSettings, task: Task) -> _TaskResult:
    """Run a task in a worker process, which reports its progress."""
    progress, num_threads = _shared

    def report(num_bytes: int, num_tokens: int) -> None:
        progress.put((num_bytes, num_tokens))
        if num_threads.value:
            os.environ |= {"RAYON_NUM_THREADS": str(num_threads.value), "TOKENIZERS_PARALLELISM": "true"}

    return _attempt(settings, task, report), 0, 0


def run_on_ray(
    tasks: Iterator[Task], settings: IntakeSettings, report: Report, *, address: str, num_workers: int | None
) -> Outcomes:
    """Run the tasks on the cluster at `address`, one Ray task each; `num_workers` are the CPUs of a local cluster.

    Raises UsageError: Ray is not installed, or there is no cluster; ChunkplanError: a task was lost more often than Ray
    tries.
    """
    try:
        import ray as package
    except ImportError as error:
        raise UsageError("Ray is not installed", hint=pip_install("ray")) from error
    ray: Any = package
    running: dict[Future[_TaskResult], Task] = {}

    def most() -> int:
        return int(ray.cluster_resources().get("CPU", 1)) * (1 + _WAITING)

    with _connected(ray, address, num_workers):
        try:
            remote, shared = ray.remote(num_cpus=1)(_run_task_on_ray), ray.put(settings)

            def submit(task: Task) -> Future[_TaskResult]:
                return cast(Future[_TaskResult], remote.remote(shared, task).future())

            yield from _run(tasks, running, submit, most, lambda is_more: None, report)
        except ray.exceptions.RayError as error:
            raise ChunkplanError(
                f"Ray could not finish: {str(error).strip().splitlines()[0]}",
                hint="look at the cluster; what was finished is not done again",
            ) from error
        finally:
            for future in running:
                ray.cancel(future.object_ref, force=True)  # type: ignore[attr-defined]


def _run_task_on_ray(settings: IntakeSettings, task: Task) -> _TaskResult:
    reports: list[tuple[int, int]] = []
    outcome = _attempt(settings, task, lambda num_bytes, num_tokens: reports.append((num_bytes, num_tokens)))
    return outcome, sum(num_bytes for num_bytes, _ in reports), sum(num_tokens for _, num_tokens in reports)


@contextmanager
def _connected(ray: Any, address: str, num_workers: int | None) -> Iterator[None]:
    """Connect Ray to the cluster until the block ends, without its log; a connection of the program itself is kept."""
    if ray.is_initialized():
        yield
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    with ExitStack() as stack:
        try:
            if address == LOCAL:
                folder = stack.enter_context(TemporaryDirectory(prefix="chunkplan-", ignore_cleanup_errors=True))
                options |= {"num_cpus": num_workers, "include_dashboard": False, "_temp_dir": folder}
            else:
                _check_reachable(address)
            with _own_signals():
                ray.init(address=address, **options)
        except (OSError, ValueError, RuntimeError) as error:
            raise UsageError(f"there is no Ray cluster at {address}: {error}", hint="--ray local starts one") from error
        stack.callback(ray.shutdown)
        yield


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM when the block ends: Ray sets handlers of its own."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if is_main else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # not one of Python
                signal.signal(number, handler)


def _check_reachable(address: str) -> None:
    """Raises OSError where nothing listens at [ray://]HOST:PORT: Ray itself would try for minutes."""
    host, sign, port = address.removeprefix("ray://").rpartition(":")
    if sign and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS_TO_CONNECT).close()
