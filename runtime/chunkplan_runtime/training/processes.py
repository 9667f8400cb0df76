"""A run on one process, or on all that were started for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from chunkplan.errors import ChunkplanError
from chunkplan.planfile.load import load_plan
from chunkplan_runtime.distributed.groups import make_groups
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.distributed.launch import TIMEOUT, find_own_gpu, joined, refuse_shared_gpus
from chunkplan_runtime.failures.lost_peers import lost_peers
from chunkplan_runtime.failures.watch import Watch
from chunkplan_runtime.layout import Layout, choose_layout
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.model_setup import choose_device
from chunkplan_runtime.training.trainer import train

#: Seconds by which rank 0 is the first to tell of what all processes find alike.
_HEAD_START = 1.0


def train_alone(config: TrainConfig) -> None:
    """Train on this process; raises what `train` raises."""
    train(choose_device(config), Job())


def train_together(config: TrainConfig) -> None:
    """Train on all processes that were started; all of them call this.

    Raises:
        ChunkplanError: as `train` does, on the one process that says it for all.
        SystemExit: another process says it, with the same exit code.
    """
    with joined(config.device):
        size, rank = dist.get_world_size(), dist.get_rank()
        watch = Watch(Layout(dp=size, rank=rank))
        watch.start()
        with _told_by_one(watch, rank), lost_peers(watch):
            refuse_shared_gpus(find_own_gpu(config.device))
            config = choose_device(config, alone=False)
            layout = choose_layout(load_plan(config.plan), size, rank)
            watch.layout = layout
            job = Job(layout, make_groups(layout, torch.device(config.device), TIMEOUT), watch)
            train(config, job)
            job.wait_for_all()
        watch.stop()


@contextmanager
def _told_by_one(watch: Watch, rank: int) -> Iterator[None]:
    """Let the first process that fails end the others and speak for them."""
    try:
        yield
    except ChunkplanError as error:
        if rank > 0:
            time.sleep(_HEAD_START)
        if not watch.fail(error.exit_code):
            sys.exit(error.exit_code)
        if rank > 0:
            error.message += f" (on process {rank})"
        raise
    except KeyboardInterrupt:
        lost = watch.interrupted()
        if lost is not None:
            raise lost from None
        raise
    except Exception:  # a mistake of ours: with its traceback, once
        if not watch.fail(1):
            sys.exit(1)
        raise
