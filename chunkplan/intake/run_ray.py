"""Runs tasks on a Ray cluster: one Ray task a piece, which writes its own files into the store.

Sources and store have to lie where every machine of the cluster finds them under the same path.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.intake.process import Job
from chunkplan.intake.result import PieceResult
from chunkplan.intake.run_local import Failed, Report, Task, attempt

#: Tasks that wait for each CPU of the cluster beside the one it does.
_WAITING = 2

#: What `--ray` says for a cluster that is started on this machine.
LOCAL = "local"


def run_on_ray(
    tasks: Iterator[Task], job: Job, report: Report, *, address: str, num_workers: int | None
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
        raise UsageError("Ray is not installed", hint="pip install 'chunkplan[ray]'") from error
    started = not ray.is_initialized()
    if started:
        _connect(ray, address, num_workers)
    cluster: Any = ray
    done = [0, 0]
    try:
        remote = ray.remote(num_cpus=1)(_attempt)
        shared = ray.put(job)
        running: dict[Any, Task] = {}
        has_failed = False
        while True:
            room = 0 if has_failed else int(cluster.cluster_resources().get("CPU", 1)) * (1 + _WAITING) - len(running)
            for task in islice(tasks, max(0, room)):
                running[remote.remote(shared, task)] = task
            if not running:
                return
            ended, _ = ray.wait(list(running), num_returns=1)
            for reference in ended:
                task, (outcome, num_bytes, num_tokens) = running.pop(reference), ray.get(reference)
                done[0] += num_bytes
                done[1] += num_tokens
                report(done[0], done[1])
                has_failed |= isinstance(outcome, Failed)
                yield task, outcome
    except ray.exceptions.RayError as error:
        raise ChunkplanError(
            f"Ray could not finish: {str(error).strip().splitlines()[0]}",
            hint="look at the cluster; what was finished is not done again",
        ) from error
    finally:
        if started:
            ray.shutdown()


def _connect(ray: Any, address: str, num_workers: int | None) -> None:
    try:
        if address == LOCAL:
            ray.init(address="local", num_cpus=num_workers, include_dashboard=False, log_to_driver=False)
        else:
            ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"there is no Ray cluster at {address}: {error}", hint="--ray local starts one") from error


def _attempt(job: Job, task: Task) -> tuple[PieceResult | Failed, int, int]:
    """A Ray task: what became of a piece, and the bytes and tokens of it."""
    done = [0, 0]

    def add(num_bytes: int, num_tokens: int) -> None:
        done[0] += num_bytes
        done[1] += num_tokens

    return attempt(job, task, add), done[0], done[1]
