"""Plans of virtual stages have the gradients of whole sequences: the model in parts that do not follow one another."""

from __future__ import annotations

import numpy as np
import pytest

from chunkplan.layers import StagePlacement
from chunkplan.planfile.load import load_plan
from chunkplan_runtime.parity import TOLERANCE
from tests.runtime.distributed.test_gradients import RECURRENT, check, predicted_tokens, routed
from tests.runtime.test_parity import MODELS
from tests.support.distributed_cases import compare_master_weights, compare_orders, gradients_with_dropout
from tests.support.memory_cases import observe_memory
from tests.support.router_cases import compare_router_loss
from tests.support.wait_cases import used_groups

TIED = "llama with biases, tied"
V = StagePlacement(2, True)


@pytest.mark.parametrize(
    "dp, k, virtual_stages, model, how",
    [
        pytest.param(1, 1, 2, MODELS[TIED], ["evaluates", "kv_offload"], marks=pytest.mark.soak),
        (2, 2, 2, MODELS[TIED], ["evaluates"]),
        pytest.param(1, 2, 3, {"model_type": "qwen2", "num_hidden_layers": 7}, [], marks=pytest.mark.soak),
        (1, 1, 2, MODELS["gemma3_text"], ["lora", "checkpointing", "keep_attention"]),
        pytest.param(1, 1, 2, RECURRENT, ["checkpointing", "keep_attention"], marks=pytest.mark.soak),
        pytest.param(2, 1, 2, RECURRENT, ["evaluates"], marks=pytest.mark.soak),
        pytest.param(2, 2, 2, MODELS["deepseek_v3, latents"], ["kv_offload", "evaluates"], marks=pytest.mark.soak),
        pytest.param(2, 2, 2, MODELS["qwen3_moe"], ["lora", "kv_offload", "checkpointing"], marks=pytest.mark.soak),
        pytest.param(1, 2, 2, MODELS["gemma2, softcaps and sliding window"], ["evaluates"], marks=pytest.mark.soak),
    ],
)
def test_interleaved_stages_are_exact(pool, plan_of, dp, k, virtual_stages, model, how):
    plan = plan_of(model, dp=dp, pp=2, k=k, schedule="interleaved", virtual_stages=virtual_stages)
    check(pool, 2 * dp, plan, **dict.fromkeys(how, True))


@pytest.mark.parametrize(
    "dp, k, model, how",
    [
        (1, 2, MODELS[TIED], ["evaluates", "kv_offload"]),
        (2, 1, {"model_type": "qwen2", "num_hidden_layers": 5}, ["lora", "checkpointing", "keep_attention"]),
        pytest.param(2, 2, MODELS["qwen3_moe"], ["checkpointing"], marks=pytest.mark.soak),
        pytest.param(1, 1, RECURRENT, ["checkpointing"], marks=pytest.mark.soak),
    ],
)
def test_split_backwards_of_stages_in_a_v_are_exact(pool, plan_of, dp, k, model, how):
    plan = plan_of(model, dp=dp, pp=2, k=k, schedule="zero-bubble-v")
    check(pool, 2 * dp, plan, **dict.fromkeys(how, True))


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 170), marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "dp, pp, placement",
    [
        (1, 2, V),
        pytest.param(2, 2, V, marks=pytest.mark.soak),
        pytest.param(1, 2, StagePlacement(2), marks=pytest.mark.soak),
        pytest.param(1, 4, V, marks=pytest.mark.soak),
    ],
)
def test_any_legal_order_of_virtual_stages_is_exact(pool, plan_of, dp, pp, placement, seeds):
    """In a V the first stage has the last model stage too: embeddings and head that are tied are one weight there."""
    model = {**MODELS[TIED], "num_hidden_layers": 2 * pp}
    plan = plan_of(model, lengths=[17, 5, 20, 4], dp=dp, pp=pp, schedule="interleaved", virtual_stages=2)
    how = {"placement": placement, "kv_offload": pp == 4 or not placement.turns}
    for start in range(0, len(seeds), 25):  # what the pool runs at once has to be done in 90 seconds
        some = seeds[start : start + 25]
        for errors in pool.run(pp * dp, compare_orders, **plan, seeds=some, **how):
            assert len(errors) == len(some)
            assert max(errors) <= TOLERANCE


@pytest.mark.parametrize("stage_layers", [(1, 2, 3, 1), pytest.param((4, 1, 1, 1), marks=pytest.mark.soak)])
def test_model_stages_of_unequal_size_are_exact_and_so_are_ranks_without_work(pool, plan_of, stage_layers):
    model = {**MODELS["qwen3"], "num_hidden_layers": 7}
    plan = plan_of(model, lengths=[41], dp=2, pp=2, k=1, schedule="interleaved")
    chunks = check(pool, 4, plan, stage_layers=stage_layers, steps=(0, 0), evaluates=True)
    assert sorted(chunks[:2]) == [[1], [6]]


@pytest.mark.soak
@pytest.mark.parametrize("scope, dp", [("batch", 1), pytest.param("sequence", 2, marks=pytest.mark.soak)])
def test_the_load_balancing_loss_is_that_of_whole_sequences_on_virtual_stages(pool, plan_of, scope, dp):
    plan = plan_of(routed(), dp=dp, pp=2, schedule="interleaved")
    for error, added, expected in pool.run(2 * dp, compare_router_loss, **plan, scope=scope):
        assert error <= TOLERANCE
        assert added == pytest.approx(expected, rel=1e-12)


@pytest.mark.soak
@pytest.mark.parametrize("dp", [1, 2])
def test_gradients_of_bfloat16_are_summed_in_float32_on_virtual_stages(pool, plan_of, dp):
    plan = plan_of(MODELS[TIED], chunk_size=3, dp=dp, pp=2, schedule="interleaved")
    assert max(error for error, _ in pool.run(2 * dp, compare_master_weights, **plan)) < 1e-6


def test_adapters_on_one_virtual_stage_alone_get_their_gradients(pool, plan_of):
    """The first stage trains something in its second part, and nothing in its first one."""
    plan = plan_of(dp=2, pp=2, schedule="interleaved")
    found = pool.run(4, compare_master_weights, **plan, targets=("2.self_attn.q_proj",))
    assert [count for _, count in found] == [2, 2, 0, 0]
    assert max(error for error, _ in found) < 1e-6


def test_virtual_stages_hold_what_the_plan_predicts_and_nothing_of_a_chunk_that_is_done(pool, plan_of):
    lengths = [23, 5, 9, 3, 30, 1, 8, 41, 2, 12, 7, 4]
    plan = plan_of(lengths=lengths, k=1, pp=2, schedule="interleaved", virtual_stages=2)
    found = pool.run(2, observe_memory, **plan)
    assert [stage.leaks for stage in found] == [[], []]
    retained, inputs, kv, _ = predicted_tokens(next(load_plan(plan["plan"]).iter_steps()), 2)
    assert [stage.retained for stage in found] == retained
    assert [stage.inputs for stage in found] == inputs
    assert [stage.kv for stage in found] == kv


def test_every_group_of_virtual_stages_is_used_before_the_first_step(pool, plan_of):
    """Of all processes, of replicas, of two directions of three links, of the stages with both ends."""
    plan = plan_of(MODELS[TIED], dp=2, pp=2, schedule="interleaved")
    for before, during in pool.run(4, used_groups, **plan):
        assert len({group for group, _ in during}) == 9
        assert during <= before


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_dropout_is_the_same_on_virtual_stages(pool, plan_of, checkpointing):
    settings = {"lengths": [30, 9, 3, 1], "tail_sharing": False}
    [alone] = pool.run(1, gradients_with_dropout, **plan_of(k=100, **settings))
    plan = plan_of(k=1, pp=2, schedule="interleaved", **settings)
    stages = pool.run(2, gradients_with_dropout, **plan, checkpointing=checkpointing)
    found = {name: gradient for stage in stages for name, gradient in stage.items()}
    assert found.keys() == alone.keys()
    for name, gradient in alone.items():
        assert np.linalg.norm(found[name] - gradient) <= 1e-12 * np.linalg.norm(gradient)
