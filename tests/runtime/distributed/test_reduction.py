"""Gradients are reduced while last backwards run, in one order of launch, within machines and then across them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from chunkplan_runtime.layout import RankLayout
from tests.runtime.distributed.test_gradients import check
from tests.runtime.distributed.test_gradients import made as made  # a fixture
from tests.runtime.test_parity import MODELS
from tests.support.distributed_cases import compare_master_weights
from tests.support.process_pool import ProcessPool, process_pool
from tests.support.reduction_cases import Recorded, layers_ahead, record, step_gradients

TIED = "llama with biases, tied"


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with process_pool(6) as started:
        yield started


@pytest.mark.parametrize("dp, pp", [(4, 1), pytest.param(2, 2, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "how",
    [
        {"lengths": [23, 5, 9, 3, 1, 30, 8]},
        {"lengths": [41], "k": 1},  # one process has all the work
        {"lengths": [17, 5, 20, 4, 9], "no_targets": [1, 3], "k": 1},
        {"lengths": [17, 5], "no_targets": [0, 1]},
    ],
    ids=["uneven", "none", "without targets", "nobody has targets"],
)
def test_a_layer_is_reduced_before_the_last_backward_comes_to_the_one_before(
    pool: ProcessPool, made: Any, dp: int, pp: int, how: dict[str, Any]
) -> None:
    """Then head and embeddings, on the stages that have any: all do when nothing is tied."""
    for process in record(pool, made(dp=dp, pp=pp, **how)):
        assert process.reduces_early
        assert layers_ahead(process) == all_ahead(process, num_ends=2 if pp == 1 else 1)


def all_ahead(process: Recorded, *, num_ends: int) -> list[int]:
    """What `layers_ahead` is where each layer is reduced when the backward has come through it, if there is one."""
    num_layers = len(process.layers)
    return [*(reversed(range(num_layers)) if process.num_backwards else [0] * num_layers), *[0] * num_ends]


def test_a_stage_in_the_middle_is_reduced_though_it_has_no_embeddings_and_no_head(pool: ProcessPool, made: Any) -> None:
    """And none of its layers is gathered again by a backward that gathers ahead."""
    plan = made({"model_type": "qwen2", "num_hidden_layers": 6}, lengths=[41, 3, 9], dp=2, pp=3, k=1)
    for process in record(pool, plan, world_size=6):
        assert process.reduces_early
        is_middle = process.layers == [2, 3]
        assert layers_ahead(process) == [1, 0, 0][: 2 if is_middle else 3]
        gathers = [event for event in process.events if "allgather" in event.what]
        assert len(gathers) == 2 + (not is_middle)


@pytest.mark.parametrize("how", [{"lengths": [23, 5, 9, 3, 1, 30, 8]}, {"lengths": [41], "k": 1}], ids=["all", "none"])
def test_a_virtual_stage_is_reduced_in_its_own_last_backward(pool: ProcessPool, made: Any, how: dict[str, Any]) -> None:
    """Then others come; a process without a chunk reduces the same in the same order."""
    model = {"model_type": "qwen2", "num_hidden_layers": 8}
    for process in record(pool, made(model, dp=2, pp=2, schedule="interleaved", **how)):
        assert process.reduces_early
        if not process.num_backwards:
            assert layers_ahead(process) == [0] * 5
            continue
        *later, one, none, of_rest = layers_ahead(process)
        assert (one, none, of_rest) == (1, 0, 0)
        [two_before, one_before] = later
        assert two_before == one_before + 1 and one_before >= 2  # layers of the other virtual stage
        assert (one_before == 2) == (process.num_backwards < 2)


@pytest.mark.parametrize(
    "machine_size, ranks",
    [(2, [[[0, 1], [2, 3]], []]), (4, [[], []]), (1, [[], []]), (3, [[], []])],
)
def test_replicas_are_on_several_machines_only_where_each_has_as_many_and_several(
    machine_size: int, ranks: list[list[list[int]]]
) -> None:
    assert RankLayout(dp=4).replicas_by_machine(0, machine_size) == ranks[0]
    assert RankLayout(dp=2, pp=2).replicas_by_machine(1, machine_size) == ranks[1]
    assert RankLayout(dp=6, pp=2).replicas_by_machine(1, 3) == [[6, 7, 8], [9, 10, 11]]


@pytest.mark.soak
def test_reducing_within_machines_and_then_across_them_gives_the_same_sums_and_always_the_same_bits(
    pool: ProcessPool, made: Any
) -> None:
    plan = made(MODELS[TIED], dp=4)
    for one, two, again in pool.run(4, step_gradients, **plan, machine_sizes=(None, 2, 2)):
        for name, gradient in one.items():
            assert np.linalg.norm(two[name] - gradient) <= 1e-12 * np.linalg.norm(gradient)
            assert np.array_equal(two[name], again[name])


def test_machines_reduce_each_layer_within_them_while_the_last_backward_goes_on(pool: ProcessPool, made: Any) -> None:
    """And across them one layer later; nothing is reduced by all replicas at once."""
    plan = made(MODELS[TIED], lengths=[41, 3, 20], dp=4, k=1)
    check(pool, 4, plan, machine_size=2, evaluates=True)
    for process in record(pool, plan, machine_size=2):
        together, within, across = process.reducing
        num_layers = len(process.layers)
        assert layers_ahead(process) == all_ahead(process, num_ends=1)
        assert [event.where for event in process.reductions] == [within, *[across, within] * num_layers, across]
        assert all(event.where != together for event in process.reductions)


@pytest.mark.parametrize("machine_size", [pytest.param(None, marks=pytest.mark.soak), 2])
def test_bfloat16_is_reduced_in_float32_also_where_a_process_has_one_chunk(
    pool: ProcessPool, made: Any, machine_size: int | None
) -> None:
    found = pool.run(4, compare_master_weights, **made(lengths=[8, 7, 6, 5], dp=4), machine_size=machine_size)
    assert max(error for error, _ in found) < 1e-6
