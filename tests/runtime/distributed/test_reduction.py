"""Gradients are reduced while last backwards run, in one order of launch, within machines and then across them."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chunkplan_runtime.layout import RankLayout
from tests.runtime.distributed.test_gradients import check
from tests.runtime.distributed.test_gradients import made as made  # a fixture
from tests.runtime.distributed.test_sharing import made as shared  # another one
from tests.runtime.test_parity import MODELS
from tests.support.distributed_cases import compare_master_weights
from tests.support.process_pool import ProcessPool, process_pool
from tests.support.reduction_cases import Recorded, launched_in_one_order, record_steps, step_gradients

TIED = "llama with biases, tied"

#: Processes 2 and 3 run one chunk, which all share, and 0 and 1 meet in another one after it.
ONE_MEETING_AFTER_ANOTHER = {97: (0, 4, 4), 26: (0, 2, 1)}


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with process_pool(4) as started:
        yield started


def record(pool: ProcessPool, plan: dict[str, Path], **how: Any) -> list[Recorded]:
    """What four processes do in a step, which they launch in one order; all replicas reduce the same."""
    processes = [steps[-1] for steps in pool.run(4, record_steps, **plan, **how)]
    launched_in_one_order(processes).prepare()
    for process in processes:
        same = [other.reductions for other in processes if other.reducing[0] == process.reducing[0]]
        sizes = [[event.num_numbers for event in reductions] for reductions in same]
        assert all(found == sizes[0] for found in sizes)
    return processes


def layers_ahead(process: Recorded) -> list[int]:
    """To how many layers the last backward has yet to come when each reduction is launched, within machines if any."""
    group = [*process.reducing, process.reducing[0]][len(process.reducing) > 1]
    ahead, found = 0, []
    for event in reversed(process.events):
        ahead += event.what == "layer"
        if event.where == group and "reduce_scatter" in event.what:
            found.append(ahead)
    return found[::-1]


@pytest.mark.parametrize("dp, pp", [(4, 1), (2, 2)])
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
    """Then embeddings and head, on the stages that have any: all do when nothing is tied."""
    for process in record(pool, made(dp=dp, pp=pp, **how)):
        assert process.reduces_early
        assert layers_ahead(process) == [*reversed(range(len(process.layers))), 0]


def test_only_where_a_process_meets_another_after_its_last_chunk_nothing_is_reduced_before_all_are_done(
    pool: ProcessPool, shared: Any
) -> None:
    """All have the same shared chunk last, or each its own; but not one that another process goes on after."""
    plans = {
        "all meet last": {97: (0, 4, 4)},
        "pairs meet last": {97: (0, 4, 1), 26: (0, 2, 2), 30: (2, 2, 1)},
        "some meet later": ONE_MEETING_AFTER_ANOTHER,
    }
    for what, blocks in plans.items():
        plan = shared(blocks, lengths=list(blocks), k=1)
        processes = record(pool, plan)
        assert {process.reduces_early for process in processes} == {what != "some meet later"}
        num_layers = len(processes[0].layers)
        assert [layers_ahead(process) for process in processes] == [[*reversed(range(num_layers)), 0]] * 4
        for process in processes:  # a padding token comes after what is of the plan
            assert sum(event.what == "layer" for event in process.events) % num_layers == 0
        check(pool, 4, plan)


def test_reducing_in_last_backwards_whoever_meets_would_launch_in_no_one_order(pool: ProcessPool, shared: Any) -> None:
    plan = shared(ONE_MEETING_AFTER_ANOTHER, lengths=list(ONE_MEETING_AFTER_ANOTHER), k=1)
    record(pool, plan)
    with pytest.raises(CycleError):
        record(pool, plan, always=True)


@pytest.mark.parametrize("pp", [1, 2])
def test_ranks_that_processes_join_are_reduced_after_the_last_of_them(pool: ProcessPool, shared: Any, pp: int) -> None:
    blocks = {97: (0, 8, 4), 26: (4, 2, 1), 30: (4, 4, 2), 9: (2, 2, 2)}
    plan = shared(blocks, lengths=[*blocks, *[8] * 16], dp=8, pp=pp, chunk_size=4, k=1)
    for process in record(pool, plan):
        assert process.reduces_early
        assert layers_ahead(process) == [*reversed(range(len(process.layers))), 0]


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
        assert layers_ahead(process) == [*reversed(range(num_layers)), 0]
        assert [event.where for event in process.reductions] == [within, *[across, within] * num_layers, across]
        assert all(event.where != together for event in process.reductions)


@pytest.mark.parametrize("machine_size", [None, 2])
def test_bfloat16_is_reduced_in_float32_also_where_a_process_has_one_chunk(
    pool: ProcessPool, made: Any, machine_size: int | None
) -> None:
    found = pool.run(4, compare_master_weights, **made(lengths=[8, 7, 6, 5], dp=4), machine_size=machine_size)
    assert max(error for error, _ in found) < 1e-6
