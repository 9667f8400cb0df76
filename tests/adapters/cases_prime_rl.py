"""Batches for prime-rl that cannot be balanced are its own affair; a sample without tokens is refused."""

from __future__ import annotations

import pytest
from prime_rl.trainer.batch import prepare_batch
from prime_rl.transports.rollouts.types import TrainingSample


def samples(*lengths: int) -> list[TrainingSample]:
    return [
        TrainingSample(
            token_ids=[1] * length,
            mask=[True] * length,
            logprobs=[0.0] * length,
            temperatures=[1.0] * length,
            advantages=[1.0] * length,
            env_name="env",
        )
        for length in lengths
    ]


def test_fewer_samples_than_workers_and_samples_over_the_cap_are_batched_as_prime_rl_does() -> None:
    assert [len(each) for each in prepare_batch(samples(5), 64, 2, sum)] == [1, 1]
    batches = [each for worker in prepare_batch(samples(5, 70, 9, 64), 64, 2, sum) for each in worker]
    assert max(len(each.input_ids) for each in batches) == 64


def test_a_sample_without_tokens_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"lengths\[1\] is 0, expected 1 .*; leave out sequences without tokens"):
        prepare_batch(samples(5, 0, 7), 64, 2, sum)
