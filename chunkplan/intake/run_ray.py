"""Runs tasks on a Ray cluster: one Ray task a piece, which writes its own files into the store.

Sources and store have to lie where every machine of the cluster finds them under the same path.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.extras import pip_install
from chunkplan.intake.process import IntakeSettings
from chunkplan.intake.result import PieceResult
from chunkplan.intake.run_local import Failed, Report, Task, attempt

#: Tasks that wait for each CPU of the cluster beside the one that it is doing.
_WAITING = 2

_SECONDS_TO_CONNECT = 5.0

#: What `--ray` says for a cluster that is started on this machine.
LOCAL = "local"


def run_on_ray(
    tasks: Iterator[Task], settings: IntakeSettings, report: Report, *, address: str, num_workers: int | None
) -> Iterator[tuple[Task, PieceResult | Failed]]:
    """Do the tasks on the cluster at `address`, in whichever order they end; none begins after one has failed.

    `num_workers` are the CPUs of a local cluster.

    Raises:
        UsageError: Ray is not installed, or there is no cluster.
        ChunkplanError: a task was lost more often than Ray tries.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError("Ray is not installed", hint=pip_install("ray")) from error
    with _connected(ray, address, num_workers):
        yield from _run(ray, tasks, settings, report)


def _run(
    ray: Any, tasks: Iterator[Task], settings: IntakeSettings, report: Report
) -> Iterator[tuple[Task, PieceResult | Failed]]:
    done = [0, 0]
    running: dict[Any, Task] = {}
    failed: Task | None = None
    try:
        remote = ray.remote(num_cpus=1)(_attempt)
        shared = ray.put(settings)
        while True:
            room = int(ray.cluster_resources().get("CPU", 1)) * (1 + _WAITING) - len(running)
            for task in islice(tasks, 0 if failed else max(0, room)):
                running[remote.remote(shared, task)] = task
            # Of several failures the first in the input is reported: what comes after one is not waited for.
            if not any(failed is None or task.piece < failed.piece for task in running.values()):
                return
            [reference], _ = ray.wait(list(running), num_returns=1)
            task, (outcome, num_bytes, num_tokens) = running.pop(reference), ray.get(reference)
            done = [done[0] + num_bytes, done[1] + num_tokens]
            report(*done)
            if isinstance(outcome, Failed):
                failed = task if failed is None or task.piece < failed.piece else failed
            yield task, outcome
    except ray.exceptions.RayError as error:
        raise ChunkplanError(
            f"Ray could not finish: {str(error).strip().splitlines()[0]}",
            hint="look at the cluster; what was finished is not done again",
        ) from error
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


@contextmanager
def _connected(ray: Any, address: str, num_workers: int | None) -> Iterator[None]:
    """Connect Ray to the cluster until the block ends, without its log; a connection of the program itself is kept."""
    if ray.is_initialized():
        yield
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    with ExitStack() as stack:
        try:
            if address == LOCAL:
                folder = stack.enter_context(TemporaryDirectory(prefix="chunkplan-", ignore_cleanup_errors=True))
                options = {"num_cpus": num_workers, "include_dashboard": False, "_temp_dir": folder}
                with _own_signals():
                    ray.init(address=LOCAL, **options, **quiet)
            else:
                _check_reachable(address)
                with _own_signals():
                    ray.init(address=address, **quiet)
        except (OSError, ValueError, RuntimeError) as error:
            raise UsageError(f"there is no Ray cluster at {address}: {error}", hint="--ray local starts one") from error
        stack.callback(ray.shutdown)
        yield


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM when the block ends: Ray sets handlers of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
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


def _attempt(settings: IntakeSettings, task: Task) -> tuple[PieceResult | Failed, int, int]:
    """A Ray task: the result of a piece, and how many bytes and tokens it had."""
    done = [0, 0]

    def add(num_bytes: int, num_tokens: int) -> None:
        done[0] += num_bytes
        done[1] += num_tokens

    return attempt(settings, task, add), done[0], done[1]
