"""A run on one process, or on all that were started for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from chunkplan.errors import ChunkplanError
from chunkplan.planfile.load import load_plan
from chunkplan.planfile.plan import Plan
from chunkplan_runtime.distributed import job as jobs
from chunkplan_runtime.failures.watchdog import Watchdog
from chunkplan_runtime.layout import RankLayout, choose_layout, used_blocks
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.scores import score
from chunkplan_runtime.training.setup import choose_device, load_plans
from chunkplan_runtime.training.trainer import train

#: Seconds by which process 0 is the first to report what all processes find alike.
_HEAD_START = 1.0


def train_alone(config: TrainConfig, callbacks: Sequence[TrainerCallback] = (), *, scores: bool = False) -> None:
    """Train on this process alone. `callbacks` are those of transformers; docs/training.md says when each is called.

    `scores`: write scores of the data instead.

    Raises:
        ChunkplanError: as `train` does.
    """
    choose_layout(load_plan(config.plan), 1, 0)  # refused here if it cannot be
    (score if scores else train)(choose_device(config), jobs.Job(), callbacks)


def train_together(config: TrainConfig, callbacks: Sequence[TrainerCallback] = (), *, scores: bool = False) -> None:
    """Train on all processes that were started; all of them call this. The rest is as in `train_alone`, for this one.

    Raises:
        ChunkplanError: as `train` does, on the one process that prints it for all.
        SystemExit: another process prints it, with the same exit code.
    """
    with jobs.joined(config.device), watched() as watchdog:
        jobs.check_gpus(jobs.gather_objects(jobs.find_own_gpu(config.device)))
        config = choose_device(config, alone=False)
        job = make_job(load_plans(config), torch.device(config.device), jobs.TIMEOUT)
        watchdog.layout = job.layout
        (score if scores else train)(config, replace(job, watchdog=watchdog), callbacks)


@contextmanager
def watched(**how: Any) -> Iterator[Watchdog]:
    """Within the block the first process that fails or dies ends the others, and is the one that raises."""
    size, process = dist.get_world_size(), dist.get_rank()
    watchdog = Watchdog(RankLayout(dp=size, process=process), **how)
    watchdog.start()
    with _printed_by_one(watchdog, process), jobs.lost_peers(watchdog):
        yield watchdog
        dist.barrier()
    watchdog.stop()


def make_job(plans: Sequence[Plan], device: torch.device, timeout: timedelta) -> jobs.Job:
    """The job of all processes for the first of `plans`; UsageError: they do not have the same, or are not as many."""
    jobs.refuse_differences(jobs.gather_objects(jobs.versions_with(plans[0])))
    layout = choose_layout(plans[0], dist.get_world_size(), dist.get_rank())
    fitting = [each for each in plans if each.config.dp == layout.dp]  # others are refused later
    # Of process 0: one that was given another evaluation plan is refused after groups are made.
    blocks = [sorted({block for each in fitting for block in used_blocks(each)})]
    dist.broadcast_object_list(blocks, src=0)
    return jobs.Job(layout, jobs.make_groups(layout, device, timeout, blocks[0]))


@contextmanager
def _printed_by_one(watchdog: Watchdog, process: int) -> Iterator[None]:
    """Within the block, the first process that fails ends the others and prints for them."""
    try:
        yield
    except ChunkplanError as error:
        if process > 0:
            time.sleep(_HEAD_START)
        if not watchdog.fail(error.exit_code):
            sys.exit(error.exit_code)
        if process > 0:
            error.message += f" (on process {process})"
        raise
    except KeyboardInterrupt:
        lost = watchdog.interrupted()
        if lost is not None:
            raise lost from None
        raise
    except Exception:  # a mistake of ours: with its traceback, once
        if not watchdog.fail(1):
            sys.exit(1)
        raise
