"""A drop-in `prepare_batch` for `prime_rl.trainer.batch` of prime-rl, put in place by `install()`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from prime_rl.trainer import batch as prime

from chunkplan.adapters.balance import balance_in_fewest

_PREPARE_BATCH = prime.prepare_batch


def install() -> None:
    """Put the function of this module in place of prime-rl's: call it before the orchestrator starts."""
    for name in ("prime_rl.trainer.batch", "prime_rl.orchestrator.packing"):
        if name in sys.modules:
            sys.modules[name].prepare_batch = prepare_batch  # type: ignore[attr-defined]


def prepare_batch(
    rollouts: Sequence[Any],
    seq_len: int,
    num_train_workers: int,
    bin_cost: Callable[[Sequence[int]], int],
    pad_to_multiple_of: int = 1,
) -> list[list[Any]]:
    """The micro-batches of each worker, as many on each and none above `seq_len` tokens, of even `bin_cost`.

    Images, experts routed for some samples only, and fewer samples than workers are left to prime-rl's own.
    """
    samples = [prime.prepare_sample(rollout, seq_len) for rollout in rollouts]
    lengths = [len(sample.input_ids) for sample in samples]
    is_alike = len({sample.routed_experts is None for sample in samples}) == 1
    has_images = any(sample.mm_kwargs is not None for sample in samples)
    found = None
    if is_alike and not has_images and len(samples) >= num_train_workers:
        found = balance_in_fewest(lengths, [bin_cost([each]) for each in lengths], num_train_workers, seq_len)
    if found is None:
        return list(_PREPARE_BATCH(rollouts, seq_len, num_train_workers, bin_cost, pad_to_multiple_of))
    return [[_micro_batch([samples[each] for each in places], pad_to_multiple_of) for places in rank] for rank in found]


def _micro_batch(samples: list[Any], pad_to_multiple_of: int) -> Any:
    """One micro-batch of several samples, padded."""
    packed = prime._MicroBatchBin(samples, sum(len(sample.input_ids) for sample in samples))
    padded = prime.pad_micro_batch(prime._materialize_bin(packed), pad_to_multiple_of)
    prime._assert_token_arrays_aligned(padded)
    return padded
