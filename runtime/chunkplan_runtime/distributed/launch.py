"""Joins the processes that torchrun, or anything that sets the same environment, has started, and parts them again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from chunkplan.errors import UsageError

#: How long a process waits for another one that lives: longer than the slowest step and the largest checkpoint.
TIMEOUT = timedelta(hours=1)

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def world_size() -> int:
    """How many processes there are to be, by the environment.

    Raises:
        UsageError: what it says is no such thing.
    """
    given = {name: os.environ.get(name) for name in _ENVIRONMENT}
    size = given["WORLD_SIZE"] or "1"
    if not size.isdecimal() or int(size) < 1:
        raise UsageError(f"WORLD_SIZE is {size!r}", hint="start it with torchrun, or with WORLD_SIZE from 1")
    missing = [name for name, value in given.items() if not value]
    if int(size) > 1 and missing:
        raise UsageError(
            f"WORLD_SIZE is {size}, and {', '.join(missing)} is not set", hint="start it with torchrun, which sets all"
        )
    return int(size)


def own_gpu() -> int:
    """Which GPU of its machine is this process's: the only one it sees, or that of its place among those there."""
    place = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    return 0 if torch.cuda.device_count() == 1 else place


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Within the block the processes have a process group: NCCL between GPUs, gloo between CPUs and for objects.

    After an error it is left as it is: what the others never send would be waited for.

    Args:
        device: as the option; "cpu" leaves GPUs alone.

    Raises:
        UsageError: the others cannot be reached.
    """
    has_gpu = device != "cpu" and torch.cuda.is_available()
    if has_gpu and own_gpu() < torch.cuda.device_count():  # else it is refused when all can hear it
        torch.cuda.set_device(own_gpu())
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except (dist.DistError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UsageError(
            f"the processes do not find each other: {str(error).splitlines()[0]}",
            where=where,
            hint="check that all were started, with the same MASTER_ADDR and MASTER_PORT and a RANK of their own",
        ) from error
    yield
    dist.destroy_process_group()
