"""Starts the processes of a run on this machine, and joins those that torchrun, or anything like it, has started."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from chunkplan.errors import UsageError
from chunkplan_runtime import set_for_several_processes
from chunkplan_runtime.devices import local_device_index

#: How long a process waits for another one that lives: longer than the slowest step and the largest checkpoint.
TIMEOUT = timedelta(hours=1)


def start(arguments: list[str], num_processes: int) -> int:
    """Run `python -m chunkplan_runtime.train` with `arguments` on as many processes; returns the exit code of the run.

    What went wrong is printed by the processes: of several that fail, the code is that of the first.
    """
    logging.disable()  # the processes say themselves what torch would say of them here
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    # A name of this machine need not resolve.
    how = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(num_processes)]
    try:
        run(parse_args([*how, "-m", "chunkplan_runtime.train", *arguments]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def world_size() -> int:
    """How many processes there are to be, as the environment says; UsageError: it says too little, or no number."""
    size = os.environ.get("WORLD_SIZE") or "1"
    if not size.isdecimal() or int(size) < 1:
        raise UsageError(f"WORLD_SIZE is {size!r}", hint="start it with torchrun, or with WORLD_SIZE from 1")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if int(size) > 1 and missing:
        raise UsageError(
            f"WORLD_SIZE is {size}, and {', '.join(missing)} is not set", hint="start it with torchrun, which sets all"
        )
    return int(size)


@dataclass(frozen=True)
class OwnGpu:
    """The GPU that a process takes: `index` of the `num_seen` that its machine shows it, with its `uuid`, if any."""

    machine: str
    index: int
    num_seen: int
    uuid: str | None


def find_own_gpu(device: str) -> OwnGpu:
    """The GPU of this process; `device` is as the option has it, and "cpu" takes none."""
    num_seen = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    index = local_device_index()
    uuid = str(torch.cuda.get_device_properties(index).uuid) if index < num_seen else None
    return OwnGpu(socket.gethostname(), index, num_seen, uuid)


def check_gpus(processes: Sequence[OwnGpu]) -> None:
    """Raise UsageError where there are GPUs, and one of `processes`, in order, has none or shares it with another."""
    takers: dict[str, int] = {}
    for number, own in enumerate(processes if any(each.num_seen for each in processes) else ()):
        if own.uuid is None:
            found = f"process {number} of {len(processes)} would take GPU {own.index}, and sees {own.num_seen}"
        elif (other := takers.setdefault(own.uuid, number)) != number:
            found = f"processes {other} and {number} of {len(processes)} would share a GPU ({own.uuid})"
        else:
            continue
        raise UsageError(
            found,
            where=own.machine,
            hint="start as many processes on a machine as it has GPUs, with LOCAL_RANK from 0, or show each of them a "
            "GPU of its own (CUDA_VISIBLE_DEVICES); without GPUs: --device cpu",
        )


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Within the block the processes have a group: NCCL between GPUs, if `device` is not "cpu", else gloo.

    After an error it is left as it is: what the others never send would be waited for. Raises UsageError if the others
    cannot be reached.
    """
    set_for_several_processes()  # where they do not come from `train.main`, which does it before torch is there
    has_gpu = device != "cpu" and torch.cuda.is_available()
    if has_gpu and local_device_index() < torch.cuda.device_count():  # else it is refused when all can hear it
        torch.cuda.set_device(local_device_index())
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=TIMEOUT)
    except (dist.DistError, ValueError) as error:
        raise UsageError(
            f"rendezvous failed: {str(error).splitlines()[0]}",
            where=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            hint="check that all processes were started, with the same MASTER_ADDR and MASTER_PORT and their own RANK",
        ) from error
    yield
    dist.destroy_process_group()
