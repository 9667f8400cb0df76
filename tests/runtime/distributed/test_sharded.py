"""Whatever processes share, weights and gradients too, gradients of any plan are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.distributed.test_gradients import check
from tests.runtime.distributed.test_gradients import made as made  # a fixture
from tests.runtime.test_parity import MODELS
from tests.support.process_pool import ProcessPool, process_pool

UNEVEN = [23, 5, 9, 3, 1, 30, 8]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with process_pool(4) as started:
        yield started


@pytest.mark.parametrize("sharding", ["gradients", "weights"])
@pytest.mark.parametrize(
    "world_size, plan, how",
    [
        (2, {"dp": 2, "k": 3}, {"evaluates": True}),
        (2, {"dp": 2, "k": 2, "lengths": [41], "global_batch": 1}, {"evaluates": True, "steps": (0,)}),
        (2, {"dp": 4, "k": 2}, {"lora": True, "checkpointing": True}),
        (4, {"dp": 4, "k": 1}, {"checkpointing": True}),
        (4, {"dp": 2, "pp": 2, "k": 2, "schedule": "1f1b"}, {"evaluates": True}),
        (4, {"dp": 4, "pp": 2, "k": 3, "schedule": "auto"}, {}),
        (4, {"dp": 2, "pp": 2, "k": 2, "schedule": "zero-bubble"}, {}),
        (4, {"dp": 2, "pp": 2, "schedule": "interleaved"}, {"evaluates": True}),
        (4, {"dp": 2, "pp": 2, "schedule": "zero-bubble-v"}, {}),
    ],
)
def test_whatever_is_shared_gradients_are_those_of_one_process(
    pool: ProcessPool, made: Any, sharding: str, world_size: int, plan: dict[str, Any], how: dict[str, Any]
) -> None:
    """Of any K, with unequal counts of chunks, or none, on pipelines of any order."""
    settings = {"lengths": UNEVEN, "global_batch": 4, **plan}
    check(
        pool,
        world_size,
        made(MODELS["llama with biases, tied"], **settings),
        sharding=sharding,
        **{"steps": (0, 1), **how},
    )
