"""Plans a whole dataset, some steps at a time, on several threads.

The same lengths, targets and configuration give the same tables in any process and with any number of workers: shuffles
come from the raw stream of a bit generator, costs are whole nanoseconds, ties are broken by position, solvers are
limited by deterministic measures.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from chunkplan.arrays import Int32Array
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.planning.batches import step_blocks
from chunkplan.planning.method import Dataset, Planned, plan_block

#: Blocks that each worker may be ahead of whoever takes the rows.
_AHEAD = 2

#: Seconds after which a thread that waits looks whether it was interrupted: where a library has put a signal handler of
#: its own around Python's (polars does), a wait goes on as if nothing had come.
_LOOK_SECONDS = 0.2

Result = TypeVar("Result")


def result_of(future: Future[Result]) -> Result:
    """Wait for what a thread makes, and raise what it raised; unlike `Future.result`, an interrupt ends it soon."""
    while not wait((future,), _LOOK_SECONDS).done:
        pass
    return future.result()


def plan_steps(
    dataset: Dataset, copies: Callable[[int], Int32Array], config: PlanConfig, cost: CostModel, *, workers: int = 1
) -> Iterator[Planned]:
    """Plan a dataset: rows of the tables of the contract and fullest moments, some steps at a time.

    `copies` says how often each sequence occurs in an epoch, int32 [num_sequences]. `workers` threads plan side by
    side.
    """
    waiting: deque[Future[Planned]] = deque()
    cancelled = threading.Event()  # threads cannot be interrupted: refinements, which may take long, look at this
    with ThreadPoolExecutor(workers) as pool:
        try:
            for block in step_blocks(copies, config):
                waiting.append(pool.submit(plan_block, block, dataset, config, cost, cancelled.is_set))
                if len(waiting) > _AHEAD * workers:
                    yield result_of(waiting.popleft())
            while waiting:
                yield result_of(waiting.popleft())
        finally:
            cancelled.set()
            pool.shutdown(cancel_futures=True)
