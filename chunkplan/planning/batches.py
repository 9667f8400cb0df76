"""Batches: every epoch is shuffled and cut into global batches, the steps, of which some are planned at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.compiled import compiled
from chunkplan.config.plan import PlanConfig

#: Random numbers drawn at once: fresh memory costs more time than drawing them.
_KEYS = 1 << 16

#: Sequences and steps of a block, at most, unless a single step has more: (step, tokens, position) of each sequence
#: then fits 63 bits; and steps times ranks times stages. Larger blocks waste less time between them; small ones do
#: where each step takes long, and progress is told block by block.
BLOCK_SEQUENCES, BLOCK_STEPS, BLOCK_STAGES = 1 << 18, 1 << 13, 1 << 13
SLOW_BLOCK_SEQUENCES = 1 << 10


@dataclass(frozen=True)
class StepBlock:
    """Steps `first_step`.. of an epoch: the sequence ids of all, and how many each has."""

    first_step: int
    epoch: int
    sequence_ids: Int32Array
    sizes: Int64Array


def epoch_order(copies: Int32Array, seed: int, epoch: int) -> Int32Array:
    """A shuffle, of its own for every (seed, epoch), of `copies` [num_sequences] of each sequence: their ids.

    A Fisher-Yates shuffle (Durstenfeld 1964) on PCG64's raw stream, which numpy keeps stable between versions as it
    does not `permutation`.
    """
    order = np.arange(copies.size, dtype=np.int32)
    if not copies.min() == copies.max() == 1:
        order = np.repeat(order, copies)
    stream = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    for stop in range(order.size, 0, -_KEYS):
        _shuffle(order, stop, stream.random_raw(min(stop, _KEYS)))
    return order


@compiled
def _shuffle(order: Int32Array, stop: int, keys: npt.NDArray[np.uint64]) -> None:
    """Exchange order[stop - 1] with any up to it, and so on downwards, one for every key."""
    for key in keys:
        stop -= 1
        other = np.int64(key % np.uint64(stop + 1))
        order[stop], order[other] = order[other], order[stop]


def batch_sizes(num_sequences: int, config: PlanConfig) -> Int64Array:
    """Sequences of each step of an epoch of `num_sequences`, int64 [num_steps]; only the last one may be short."""
    full, rest = divmod(num_sequences, config.global_batch)
    return np.array([config.global_batch] * full + ([rest] if rest and config.last_batch == "keep" else []), np.int64)


def step_blocks(copies: Callable[[int], Int32Array], config: PlanConfig) -> Iterator[StepBlock]:
    """The steps of all epochs, as many together as fit a block. No step spans two epochs."""
    is_slow = config.balance == "search" or config.packing not in ("auto", "bfd")
    most_sequences = SLOW_BLOCK_SEQUENCES if is_slow else BLOCK_SEQUENCES
    most_steps = 1 if config.schedule == "search" else min(BLOCK_STAGES // (config.dp * config.pp), BLOCK_STEPS)
    per_block = max(1, min(most_sequences // config.global_batch, most_steps))
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


def longest_first(block: StepBlock, num_tokens: Int32Array) -> tuple[Int32Array, Int64Array]:
    """The sequence ids of a block and their tokens, those of each step descending; equal ones stay in order.

    Sorts (step, -tokens, position) packed into one integer, which is several times faster than an indirect sort.
    """
    num_bits = int(block.sequence_ids.size).bit_length()
    longest = np.iinfo(np.int32).max
    step = np.repeat(np.arange(block.sizes.size), block.sizes)
    keys = (step << 31) + (longest - num_tokens[block.sequence_ids])
    keys = (keys << num_bits) + np.arange(block.sequence_ids.size)
    keys.sort()
    ids: Int32Array = block.sequence_ids[keys & ((1 << num_bits) - 1)]
    tokens: Int64Array = longest - ((keys >> num_bits) & longest)
    return ids, tokens
