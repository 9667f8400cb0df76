"""Plans of virtual stages have the gradients of whole sequences: the model in parts that do not follow one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from chunkplan_runtime.parity import TOLERANCE
from tests.runtime.distributed.test_gradients import check
from tests.runtime.distributed.test_gradients import made as made  # a fixture
from tests.runtime.test_parity import MODELS
from tests.support.distributed_cases import compare_orders
from tests.support.process_pool import ProcessPool, process_pool

TIED = "llama with biases, tied"


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with process_pool(4) as started:
        yield started


@pytest.mark.parametrize(
    "dp, k, virtual_stages, model, how",
    [
        (1, 1, 2, MODELS[TIED], ["evaluates", "kv_offload"]),
        (2, 2, 2, MODELS[TIED], ["evaluates"]),
        (1, 2, 3, {"model_type": "qwen2", "num_hidden_layers": 7}, []),
        (1, 1, 2, MODELS["gemma3_text"], ["lora", "checkpointing"]),
    ],
)
def test_interleaved_stages_are_exact(
    pool: ProcessPool, made: Any, dp: int, k: int, virtual_stages: int, model: dict[str, Any], how: list[str]
) -> None:
    plan = made(model, dp=dp, pp=2, k=k, schedule="interleaved", virtual_stages=virtual_stages)
    check(pool, 2 * dp, plan, **dict.fromkeys(how, True))


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 170), marks=pytest.mark.soak)])
@pytest.mark.parametrize("dp, v_shaped", [(2, True), pytest.param(1, False, marks=pytest.mark.soak)])
def test_any_legal_order_of_virtual_stages_is_exact(
    pool: ProcessPool, made: Any, dp: int, v_shaped: bool, seeds: range
) -> None:
    """In a V the first stage has the last model stage too: embeddings and head that are tied are one weight there."""
    plan = made(MODELS[TIED], lengths=[17, 5, 20, 4], dp=dp, pp=2, schedule="interleaved", virtual_stages=2)
    for errors in pool.run(2 * dp, compare_orders, **plan, seeds=seeds, v_shaped=v_shaped):
        assert len(errors) == len(seeds)
        assert max(errors) <= TOLERANCE
