"""Cuts every epoch's shuffle into global batches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.compiled import compiled
from chunkplan.config.plan import PlanConfig

#: Random numbers drawn at once: fresh memory costs more time than drawing them.
_KEYS = 1 << 16


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
