"""Cuts every epoch's shuffle into global batches."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.compiled import compiled
from chunkplan.planning.config import PlanConfig


def epoch_order(copies: Int32Array, seed: int, epoch: int) -> Int32Array:
    """A shuffle, of its own for every (seed, epoch), of `copies` [num_sequences] of each sequence: their ids.

    A Fisher-Yates shuffle (Durstenfeld 1964) on PCG64's raw stream, which numpy keeps stable between versions as it
    does not `permutation`.
    """
    order = np.arange(copies.size, dtype=np.int32)
    if (copies != 1).any():
        order = np.repeat(order, copies)
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(max(order.size, 1))
    _shuffle(order, keys)
    return order


@compiled
def _shuffle(order: Int32Array, keys: np.ndarray) -> None:
    for last in range(order.size - 1, 0, -1):
        other = np.int64(keys[last] % np.uint64(last + 1))
        order[last], order[other] = order[other], order[last]


def batch_sizes(num_sequences: int, config: PlanConfig) -> Int64Array:
    """Sequences of each step of an epoch of `num_sequences`, int64 [num_steps]; only the last one may be short."""
    full, rest = divmod(num_sequences, config.global_batch)
    return np.array([config.global_batch] * full + ([rest] if rest and config.last_batch == "keep" else []), np.int64)
