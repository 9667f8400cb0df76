"""Whatever processes share, weights and gradients too, gradients of any plan are those of one process."""

from __future__ import annotations

import pytest

from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import read_model_config
from chunkplan.operations import MEETINGS
from chunkplan.planfile.load import load_plan
from tests.runtime.distributed.test_gradients import check
from tests.runtime.test_parity import MODELS
from tests.support.distributed_cases import compare_master_weights
from tests.support.reduction_cases import count_of_slots

UNEVEN = [23, 5, 9, 3, 1, 30, 8]


@pytest.mark.parametrize("sharding", ["gradients", "weights"])
@pytest.mark.parametrize(
    "world_size, plan, how",
    [
        (2, {"dp": 2, "k": 3}, {"evaluates": True}),
        (4, {"dp": 2, "pp": 2, "k": 2, "schedule": "1f1b"}, {"evaluates": True}),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                (4, {"dp": 2, "pp": 2, "schedule": "zero-bubble-v"}, {}),
                (2, {"dp": 2, "k": 2, "lengths": [41], "global_batch": 1}, {"evaluates": True, "steps": (0,)}),
                (2, {"dp": 4, "k": 2}, {"lora": True, "checkpointing": True}),
                (4, {"dp": 4, "k": 1}, {"checkpointing": True}),
                (2, {"dp": 2, "k": 2}, {"checkpointing": "offload"}),
                (4, {"dp": 4, "pp": 2, "k": 3, "schedule": "auto"}, {}),
                (4, {"dp": 2, "pp": 2, "k": 2, "schedule": "zero-bubble"}, {}),
                (4, {"dp": 2, "pp": 2, "schedule": "interleaved"}, {"evaluates": True}),
            )
        ),
    ],
)
def test_whatever_is_shared_gradients_are_those_of_one_process(pool, plan_of, sharding, world_size, plan, how):
    """Of any K, with unequal counts of chunks, or none, on pipelines of any order."""
    settings = {"lengths": UNEVEN, "global_batch": 4, **plan}
    check(
        pool,
        world_size,
        plan_of(MODELS["llama with biases, tied"], **settings),
        sharding=sharding,
        **{"steps": (0, 1), **how},
    )


@pytest.mark.parametrize("sharding", ["gradients", "weights"])
@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 4, "k": 2},
        {"dp": 2, "pp": 2, "k": 2, "schedule": "zero-bubble"},
        pytest.param({"dp": 4, "k": 1}, marks=pytest.mark.soak),
        pytest.param({"dp": 2, "pp": 2, "schedule": "interleaved"}, marks=pytest.mark.soak),
    ],
)
def test_replicas_gather_and_reduce_what_the_slots_say_in_one_order(pool, plan_of, sharding, plan):
    """Of the same sizes; also a replica that has less to do than others.

    In all slots they send what a ring of the ranks sends in the times that slots are predicted with. Predicted are
    matrices; two norms a layer come to them.
    """
    settings = plan_of({"model_type": "llama"}, lengths=UNEVEN, **plan)
    found = pool.run(4, count_of_slots, **settings, sharding=sharding)
    opened = load_plan(settings["plan"])
    dp, pp = opened.config.dp, opened.config.pp
    for process in found:
        assert (process.gathers, process.reductions) == (process.expected_gathers, process.expected_reductions)
    for first in range(0, 4, dp):
        launched = [process.launched for process in found[first : first + dp]]
        assert launched[0]
        assert all(each == launched[0] for each in launched)
    cost = CostModel(shape=read_model_config(settings["config"]), precision="fp32", sharding=sharding)
    step, meetings = next(opened.iter_steps()), MEETINGS[sharding]
    rates, layers = cost.rates_on(dp), opened.config.layers(cost.shape.num_layers)
    norms = 2 * cost.shape.hidden_size * 4 * (dp - 1) / dp
    ring = cost.hardware.ring_bytes(dp, 1)
    gathered, reduced = ((each - cost.hardware.link_ns) * ring / 1e9 + norms for each in (rates.gather, rates.reduce))
    for number, process in enumerate(found):
        stage = number // dp
        slots = {
            slot: (meetings[action.op], layers[action.virtual_stage * pp + stage])
            for rank in range(dp)
            for action, slot in zip(step.actions[rank, stage], step.slots[rank, stage], strict=True)
            if action.op in meetings
        }
        ops, counts = zip(*slots.values(), strict=True)
        gathers = sum(n for op, n in zip(ops, counts, strict=True) if op != "backward_weight")
        reductions = sum(n for op, n in zip(ops, counts, strict=True) if op in ("backward", "backward_weight"))
        of_layers = cost.shape.layer_parameters + 2 * cost.shape.hidden_size
        sent = {
            kind: sum(numbers * share for what, numbers in process.launched if kind in what and numbers in sizes)
            for kind, share, sizes in (
                ("allgather", 4 * (dp - 1) / dp, {of_layers}),
                ("reduce_scatter", 4 * (dp - 1), {of_layers / dp}),
            )
        }
        assert sent["reduce_scatter"] == pytest.approx(reductions * reduced, rel=1e-9)
        if sharding == "weights":
            assert sent["allgather"] == pytest.approx(gathers * gathered, rel=1e-9)
        else:
            assert rates.gather == 0


@pytest.mark.parametrize("sharding", [pytest.param("gradients", marks=pytest.mark.soak), "weights"])
def test_bfloat16_is_summed_in_float32_whatever_is_shared(pool, plan_of, sharding):
    """Also between the halves of backwards, beside whole ones."""
    plan = plan_of(lengths=UNEVEN, dp=2, pp=2, k=2, schedule="zero-bubble")
    found = pool.run(4, compare_master_weights, **plan, sharding=sharding)
    assert max(error for error, _ in found) < 1e-6


@pytest.mark.parametrize("layer", [0, 3])
def test_layers_before_the_first_that_is_trained_are_in_no_backward(pool, plan_of, layer):
    """On the first stage; on the others there is a gradient for the stage before."""
    plan = plan_of(dp=2, pp=2, k=2)
    found = pool.run(4, compare_master_weights, **plan, targets=(f"{layer}.self_attn.q_proj",), sharding="weights")
    assert [count for _, count in found] == ([2, 2, 0, 0] if layer == 0 else [0, 0, 2, 2])
    assert max(error for error, _ in found) < 2e-2
