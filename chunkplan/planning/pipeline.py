"""Batches -> ranks -> chunks -> order -> predictions: the whole planner, as a function over arrays.

The same lengths, targets and configuration give the same tables in any process and with any number of workers: shuffles
come from the raw stream of a bit generator, costs are whole nanoseconds, ties are broken by position, solvers are
limited by deterministic measures.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from chunkplan.arrays import Int32Array
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.planning.batches import batch_sizes, epoch_order
from chunkplan.planning.block import (
    BLOCK_SEQUENCES,
    BLOCK_STEPS,
    SLOW_BLOCK_SEQUENCES,
    Dataset,
    Planned,
    StepBlock,
    plan_block,
)

#: Blocks that each worker may be ahead of whoever takes the rows.
_AHEAD = 2


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
            for block in _blocks(copies, config):
                waiting.append(pool.submit(plan_block, block, dataset, config, cost, cancelled.is_set))
                if len(waiting) > _AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            cancelled.set()
            pool.shutdown(cancel_futures=True)


def _blocks(copies: Callable[[int], Int32Array], config: PlanConfig) -> Iterator[StepBlock]:
    """The steps of all epochs, as many together as fit a block. No step spans two epochs."""
    is_slow = config.balance == "search" or config.packing not in ("auto", "bfd")
    most_sequences = SLOW_BLOCK_SEQUENCES if is_slow else BLOCK_SEQUENCES
    per_block = min(max(1, most_sequences // config.global_batch), BLOCK_STEPS)
    first_step = 0
    for epoch in range(config.epochs):
        order = epoch_order(copies(epoch), config.seed, epoch)
        sizes = batch_sizes(order.size, config)
        for step in range(0, sizes.size, per_block):
            block_sizes = sizes[step : step + per_block]
            start = step * config.global_batch
            stop = start + int(block_sizes.sum())
            yield StepBlock(first_step + step, epoch, order[start:stop], block_sizes)
        first_step += sizes.size
