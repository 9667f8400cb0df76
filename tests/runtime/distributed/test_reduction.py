"""Gradients are reduced while last backwards run, in one order of launch."""

from __future__ import annotations

import pytest

from tests.support.distributed_cases import compare_master_weights
from tests.support.reduction_cases import layers_ahead, record


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
def test_a_layer_is_reduced_before_the_last_backward_comes_to_the_one_before(pool, plan_of, dp, pp, how):
    """Then head and embeddings, on the stages that have any: all do when nothing is tied."""
    for process in record(pool, plan_of(dp=dp, pp=pp, **how)):
        assert process.reduces_early
        assert layers_ahead(process) == all_ahead(process, num_ends=2 if pp == 1 else 1)


def all_ahead(process, *, num_ends):
    """What `layers_ahead` is where each layer is reduced when the backward has come through it, if there is one."""
    num_layers = len(process.layers)
    return [*(reversed(range(num_layers)) if process.num_backwards else [0] * num_layers), *[0] * num_ends]


def test_a_stage_in_the_middle_is_reduced_though_it_has_no_embeddings_and_no_head(pool, plan_of):
    """And none of its layers is gathered again by a backward that gathers ahead."""
    plan = plan_of({"model_type": "qwen2", "num_hidden_layers": 6}, lengths=[41, 3, 9], dp=2, pp=3, k=1)
    for process in record(pool, plan, world_size=6):
        assert process.reduces_early
        is_middle = process.layers == [2, 3]
        assert layers_ahead(process) == [1, 0, 0][: 2 if is_middle else 3]
        gathers = [event for event in process.events if "allgather" in event.what]
        assert len(gathers) == 2 + (not is_middle)


@pytest.mark.parametrize("how", [{"lengths": [23, 5, 9, 3, 1, 30, 8]}, {"lengths": [41], "k": 1}], ids=["all", "none"])
def test_a_virtual_stage_is_reduced_in_its_own_last_backward(pool, plan_of, how):
    """Then others come; a process without a chunk reduces the same in the same order."""
    model = {"model_type": "qwen2", "num_hidden_layers": 8}
    for process in record(pool, plan_of(model, dp=2, pp=2, schedule="interleaved", **how)):
        assert process.reduces_early
        if not process.num_backwards:
            assert layers_ahead(process) == [0] * 5
            continue
        *later, one, none, of_rest = layers_ahead(process)
        assert (one, none, of_rest) == (1, 0, 0)
        [two_before, one_before] = later
        assert two_before == one_before + 1 and one_before >= 2  # layers of the other virtual stage
        assert (one_before == 2) == (process.num_backwards < 2)


def test_bfloat16_is_reduced_in_float32_also_where_a_process_has_one_chunk(pool, plan_of):
    found = pool.run(4, compare_master_weights, **plan_of(lengths=[8, 7, 6, 5], dp=4))
    assert max(error for error, _ in found) < 1e-6
