"""Adapters in place of all weights: what they take in time and memory, and what frozen weights no longer do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import attention_pairs_of, balance_layers, durations, work_ns
from chunkplan.cost.memory import activation_bytes_per_token, stage_memory
from chunkplan.cost.model import CostModel
from chunkplan.cost.optimizers import GRADIENT_BYTES
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan.cost.states import reduction_ns, stage_parameters
from chunkplan.cost.token_bytes import ResidentTokens
from chunkplan.errors import DataError, UsageError
from chunkplan.operations import OPS
from chunkplan.tuning.trial import why_plan_only
from tests.cost.test_model import MIXTURE
from tests.support.plain import PLAIN, plain_cost

GIB = 1 << 30
WHOLE, RANK_16 = plain_cost(), plain_cost(lora_rank=16)
[LAYER] = QWEN2_5_7B.kinds

#: Of Qwen2.5-7B: what goes in and out of its seven matrices.
WIDTH = (3 * 3584 + 3584 + 2 * 3584 + 18944) + (3584 + 2 * 512 + 3584 + 2 * 18944 + 3584)


def times_of(cost: CostModel, num_tokens: int = 8192, prefix: int = 0) -> dict[str, int]:
    """Of one layer and the head, by op."""
    tokens = np.array([num_tokens])
    times = durations(tokens, attention_pairs_of(tokens, np.array([prefix])), cost.rates, (1,))
    return {op: int(times[place, 0, 0]) for place, op in enumerate(OPS)}


def test_adapters_of_every_matrix_of_a_layer_have_rank_times_what_goes_in_and_out() -> None:
    """40.4 million parameters of Qwen2.5-7B at rank 16, as peft prints them."""
    assert RANK_16.adapters.trained_parameters(LAYER) == 16 * WIDTH
    assert 28 * 16 * WIDTH == 40_370_176
    assert WHOLE.adapters.trained_parameters(LAYER) == LAYER.parameters(3584)


def test_gradients_and_optimizer_states_are_those_of_adapters_alone() -> None:
    """And weights those of the model with the adapters; embeddings and head are frozen too."""
    trained = 28 * 16 * WIDTH
    for precision, num_bytes, optimizer in (("bf16", 2, 12), ("fp32", 4, 8)):
        [memory] = stage_memory(
            plain_cost(lora_rank=16, precision=precision),
            dp=1,
            layers=(28,),
            held=[ResidentTokens(8192)],
            chunk_size=8192,
        )
        assert (memory.gradients, memory.optimizer) == (4 * trained, optimizer * trained)
        assert memory.weights == num_bytes * (QWEN2_5_7B.num_parameters + trained)


def test_weights_in_4_bits_take_half_a_byte_and_their_scales() -> None:
    """Those of layers; embeddings and head stay, and one matrix is whole at a time."""
    cost = plain_cost(lora_rank=16, load_in_4bit=True)
    scales = 1 / 64 + 4 / (64 * 256)
    of_layers = 28 * (LAYER.parameters(3584) * (0.5 + scales) + 2 * 16 * WIDTH)
    [memory] = stage_memory(cost, dp=1, layers=(28,), held=[ResidentTokens(8192)], chunk_size=8192)
    rest = 2 * 2 * QWEN2_5_7B.embedding_parameters + 2 * 3584 * 18944
    assert memory.weights == pytest.approx(of_layers + rest, abs=1)
    assert memory.weights < 6 * GIB


def test_sharding_divides_adapters_and_frozen_weights_among_the_ranks() -> None:
    """Shares of frozen weights are there beside whole ones; those of adapters are master weights."""

    def memory(sharding: str, dp: int) -> tuple[int, int, int]:
        [found] = stage_memory(
            replace(RANK_16, sharding=sharding), dp=dp, layers=(28,), held=[ResidentTokens()], chunk_size=8192
        )
        return found.weights, found.gradients, found.optimizer

    whole, adapters = memory("none", 8), 16 * WIDTH
    frozen = whole[0] - 2 * 28 * adapters
    assert memory("optimizer", 8) == (whole[0] + frozen // 8, whole[1], whole[2] // 8)
    weights, gradients, _ = memory("weights", 8)
    assert gradients == whole[1] // 8 + 2 * 4 * adapters
    ends = 2 * 2 * QWEN2_5_7B.embedding_parameters
    assert weights == frozen // 8 + ends + 2 * 2 * (LAYER.parameters(3584) + adapters)


@pytest.mark.parametrize("prefix", [0, 100_000])
def test_a_backward_leaves_the_products_of_frozen_weights_out_and_attention_takes_as_long(prefix: int) -> None:
    """Of a layer and of the head, which takes as many again in the forward and for the gradients of inputs."""
    forward, backward = (times_of(RANK_16, prefix=prefix)[op] for op in ("forward", "backward"))
    product = 2e9 / RANK_16.hardware.flops
    tokens, ramp = 8192, RANK_16.hardware.ramp_tokens
    frozen = product * ((tokens + ramp) * LAYER.parameters(3584) + tokens * QWEN2_5_7B.embedding_parameters)
    sums = 6e9 * 16 * WIDTH / RANK_16.hardware.copy_bytes  # of the gradients of adapters
    assert backward == pytest.approx(2 * forward - frozen + sums, abs=2)
    longer = [times_of(cost, 8192, 10_000)["backward"] - times_of(cost)["backward"] for cost in (WHOLE, RANK_16)]
    assert longer[0] == pytest.approx(longer[1], abs=2)


def test_with_adapters_a_forward_takes_longer_and_a_step_less() -> None:
    """peft runs the kernels of an adapter one by one: they read what goes in and write what comes out several times."""
    whole, adapted = times_of(WHOLE), times_of(RANK_16)
    assert whole["forward"] < adapted["forward"] < 1.35 * whole["forward"]
    assert adapted["forward"] + adapted["backward"] < whole["forward"] + whole["backward"]
    assert times_of(replace(RANK_16, lora_rank=64))["forward"] > adapted["forward"]


def test_weights_are_made_whole_from_4_bits_once_in_a_forward_and_once_in_a_backward() -> None:
    """For each chunk, whatever its tokens."""
    cost = plain_cost(lora_rank=16, load_in_4bit=True)
    unpacking = LAYER.parameters(3584) * (0.5 + 1 / 64 + 4 / (64 * 256) + 2) / cost.hardware.copy_bytes * 1e9
    for tokens in (1024, 8192):
        packed, plain = times_of(cost, tokens), times_of(RANK_16, tokens)
        for op in ("forward", "backward"):
            assert packed[op] - plain[op] == pytest.approx(unpacking, abs=2)


def test_the_weight_half_of_a_backward_has_almost_nothing_to_do() -> None:
    times = times_of(RANK_16)
    assert times["backward_input"] + times["backward_weight"] == pytest.approx(times["backward"], abs=2)
    assert 0 < times["backward_weight"] < times_of(WHOLE)["backward_weight"] / 8


def test_work_is_what_the_chunks_of_it_take() -> None:
    """Of a sequence in one chunk, beside what a chunk takes."""
    for cost in (WHOLE, RANK_16, plain_cost(lora_rank=16, load_in_4bit=True, checkpointing="full")):
        tokens = np.array([8192])
        pairs = attention_pairs_of(tokens, np.array([0]))
        times = durations(tokens, pairs, cost.rates, (28,))[:, 0, 0]
        done = times[OPS.index("forward")] + times[OPS.index("backward")]
        assert work_ns(cost, tokens, pairs)[0] + cost.chunk_ns == pytest.approx(done, abs=10)


def test_utilisation_counts_four_flops_a_frozen_parameter_and_six_an_adapters() -> None:
    met = QWEN2_5_7B.num_parameters - QWEN2_5_7B.embedding_parameters
    assert RANK_16.model_flops(1.0, 0.0) == pytest.approx(4 * met + 6 * 28 * 16 * WIDTH)
    pairs = [cost.model_flops(0.0, 100.0) for cost in (WHOLE, RANK_16)]
    assert pairs[0] == pairs[1]


def test_what_ranks_reduce_is_the_gradients_of_adapters_alone() -> None:
    options = {"dp": 8, "pp": 1, "layers": (28,)}
    for sharding in ("none", "optimizer"):
        whole, adapted = (reduction_ns(replace(cost, sharding=sharding), **options) for cost in (WHOLE, RANK_16))
        assert adapted == pytest.approx(whole * 28 * 16 * WIDTH / QWEN2_5_7B.num_parameters, rel=1e-6)
    in_layers = replace(RANK_16, sharding="weights")
    rates = in_layers.rates_on(8)
    assert reduction_ns(in_layers, **options) == round(rates.gather + rates.reduce)  # the first layer and the last one
    link_ns = in_layers.hardware.link_ns
    assert rates.reduce == in_layers.ring_ns(16 * WIDTH * GRADIENT_BYTES, 8) + link_ns
    held = 2 * (LAYER.parameters(3584) + 16 * WIDTH)
    assert rates.gather == in_layers.ring_ns(held, 8) + link_ns
    trained = [(stage.trained_layers > 0, stage.trained_ends) for stage in stage_parameters(RANK_16, 2, (14, 14))]
    assert trained == [(True, 0.0), (True, 0.0)]


def test_the_stage_with_the_head_has_fewer_layers_than_where_that_is_trained() -> None:
    """A frozen head takes two thirds of a trained one, and so does a layer's product, but not its copies."""
    layers = {cost.lora_rank: balance_layers(cost, 4, 8192.0) for cost in (WHOLE, RANK_16)}
    assert layers[16][-1] >= layers[0][-1]
    assert sum(layers[16]) == 28


def test_activations_are_those_that_adapters_and_the_inputs_of_frozen_layers_need() -> None:
    """Two normalised inputs less, and of seven adapters what lies between their matrices. Checkpoints are as ever."""
    less = activation_bytes_per_token(WHOLE, LAYER) - activation_bytes_per_token(RANK_16, LAYER)
    assert less == 2 * 2 * 3584 - 7 * 16 * 2
    full = [activation_bytes_per_token(replace(cost, checkpointing="full"), LAYER) for cost in (WHOLE, RANK_16)]
    assert full[0] == full[1]


def test_adapters_are_in_the_entries_of_a_cost_model_only_where_there_are_any() -> None:
    """So that plans from before are read, and written as they were."""
    assert not {"lora_rank", "load_in_4bit"} & plain_cost().to_dict().keys()
    for cost in (RANK_16, plain_cost(lora_rank=16, load_in_4bit=True)):
        assert CostModel.from_dict(cost.to_dict(), where="a test") == cost
    with pytest.raises(DataError, match=r"`cost_model\.lora_rank` is -1"):
        CostModel.from_dict({**RANK_16.to_dict(), "lora_rank": -1}, where="a test")


def test_what_cannot_be_adapted_is_refused() -> None:
    with pytest.raises(UsageError, match="weights in 4 bits cannot be trained"):
        plain_cost(load_in_4bit=True)
    with pytest.raises(UsageError, match=r"the experts of .* cannot be kept in 4 bits"):
        plain_cost(shape=MIXTURE, lora_rank=16, load_in_4bit=True)


def test_weights_in_4_bits_are_plan_only_on_several_gpus() -> None:
    cost = plain_cost(lora_rank=16, load_in_4bit=True, hardware=PLAIN)
    assert why_plan_only(PlanConfig(chunk_size=8192, k=1), cost) is None
    assert why_plan_only(PlanConfig(chunk_size=8192, k=1, dp=2), cost) == "weights in 4 bits on several GPUs"
    assert why_plan_only(PlanConfig(chunk_size=8192, k=1, dp=2), RANK_16) is None
