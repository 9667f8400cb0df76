"""Inputs of layers in host memory: gradients are plain training's, and device and host hold what the planner counts."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import AutoConfig

from chunkplan.cost.activations import working_bytes_per_token
from chunkplan.cost.memory import memory_rates
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import shape_of_config
from chunkplan.planning.memory import stage_host_bytes
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import ChunkTensors, PlanStream, open_plan
from chunkplan_runtime.kv.host_memory import HostTensors
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.layout import Span
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.trained import add_lora
from chunkplan_runtime.parity import compare_plan
from tests.support.alive import Alive

CHUNKS = [[(0, 0, 8)], [(0, 8, 16)], [(0, 16, 24)], [(0, 24, 32)], [(1, 0, 3), (2, 0, 5)]]
LENGTHS = [32, 3, 5]
LEVELS = ["offload", "offload:2,full:1", "none:1,offload:2", "offload:1,keep-products:1,offload:1"]

#: Several kinds of layers: one runs a chunk segment by segment.
MODELS = {
    "llama": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gemma3_text": {"sliding_window": 8},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_d_ssm": 32},
}
SIZES = {"hidden_size": 128, "intermediate_size": 336, "head_dim": 32}


@pytest.mark.parametrize(
    ("model_type", "levels"),
    [
        pytest.param(name, levels, marks=() if number == place else pytest.mark.soak)
        for number, name in enumerate(MODELS)
        for place, levels in enumerate(LEVELS)
    ],
)
def test_gradients_are_those_of_plain_training(tiny_config, handmade_plan, random_sequences, model_type, levels):
    """Chunks that are discarded among them, and several that are kept."""
    config = AutoConfig.for_model(**tiny_config(model_type, num_hidden_layers=3, **MODELS[model_type]))
    for k in (1, 3):
        model = new_model(config, torch.float64, seed=3)
        model.set_checkpointing(levels)
        plan = handmade_plan(random_sequences(LENGTHS), [{0: CHUNKS}], k=k)
        report = compare_plan(*plan, model, kv_offload=k == 3 and model_type != "falcon_h1")
        assert report.max_relative_error <= 1e-13
        assert model.current.host_inputs.num_bytes > 0


def work_of(handmade_plan, random_sequences, k):
    plan = handmade_plan(random_sequences(LENGTHS), [{0: CHUNKS}], k=k)
    [work] = next(iter(PlanStream(*open_plan(*plan), vocab_size=97, max_positions=256))).ranks
    return work


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_host_holds_the_inputs_of_all_layers_of_the_chunks_in_flight(
    tiny_config, handmade_plan, random_sequences, k
):
    """K chunks of 8 tokens; of layers that keep their inputs on the device none. All of it is free after a step."""
    config = tiny_config("llama", num_hidden_layers=3)
    model = new_model(AutoConfig.for_model(**config), torch.float32, seed=3)
    work = work_of(handmade_plan, random_sequences, k)
    for levels in ("offload", "offload:2,full:1"):
        model.set_checkpointing(levels)
        model.current.host_inputs = HostTensors()
        RankExecutor(model).run(work, 30)
        cost = CostModel(shape=shape_of_config(config, "a test"), precision="fp32", checkpointing=levels)
        predicted = stage_host_bytes(cost, layers=(3,), retained_tokens=[8 * k], kv_tokens=[0], attention_tokens=[0])
        held = model.current.host_inputs
        assert (held.num_bytes,) == predicted
        assert sum(memory.nbytes for memory in held.unused) == held.num_bytes


def chunk_of(num_tokens):
    places = torch.arange(num_tokens, dtype=torch.int32)[None]
    labels = torch.zeros(num_tokens, dtype=torch.int64)
    return ChunkTensors(0 * places, places, labels, (Span(0, 0, num_tokens, num_tokens, 0, None),))


def model_of(config, rank, level):
    model = new_model(AutoConfig.for_model(**config), torch.bfloat16, seed=3)
    model = add_lora(model, rank=rank, alpha=4) if rank else model
    model.set_checkpointing(level)
    return model


@pytest.mark.parametrize(
    ("model_type", "rank"),
    [("llama", 4), *(pytest.param(name, 0, marks=pytest.mark.soak) for name in ("llama", "qwen3"))],
)
def test_the_planner_predicts_what_the_device_holds_of_chunks_in_flight(tiny_config, model_type, rank):
    """Of each chunk what is around the layers; of all together the two inputs that left last."""
    num_tokens, config = 64, tiny_config(model_type, num_hidden_layers=4, **SIZES)
    model = model_of(config, rank, "offload")
    held = []
    with Alive() as alive:
        graphs = []
        for _ in range(4):
            graphs.append(model.hidden_states(chunk_of(num_tokens), KVStore(num_tokens)))
            gc.collect()
            held.append(alive.num_bytes() - model.current.host_inputs.num_bytes)
    cost = CostModel(shape=shape_of_config(config, "a test"), lora_rank=rank, checkpointing="offload")
    of_chunk = num_tokens * memory_rates(cost, 1, (4,), num_tokens).tokens[0, 0]
    leaving = 2 * num_tokens * SIZES["hidden_size"] * 2
    for count, measured in enumerate(held, 1):
        predicted = count * of_chunk + leaving
        assert measured <= predicted <= 1.1 * measured
    assert model.current.host_inputs.num_bytes == 4 * 4 * num_tokens * SIZES["hidden_size"] * 2


def peak_of(config, level, num_tokens):
    """The most bytes on the device in the backward of a chunk."""
    model = model_of(config, 0, level)
    with Alive() as alive:
        hidden = model.hidden_states(chunk_of(num_tokens), KVStore(num_tokens))
        on_host = model.current.host_inputs.num_bytes
        gradient = torch.ones_like(hidden)
        for weight in model.model.parameters():
            weight.grad = None
            weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
        alive.peak = 0
        hidden.backward(gradient)
    assert model.current.host_inputs.num_bytes == on_host
    return alive.peak - on_host


@pytest.mark.parametrize("num_layers", [4, 8])
def test_a_backward_has_the_inputs_of_two_layers_on_the_device(tiny_config, num_layers):
    """Beside `full` at its fullest, which has those of all layers: in the backward of the last one."""
    num_tokens = 256
    config = tiny_config("llama", num_hidden_layers=num_layers, **SIZES)
    full, offload = (peak_of(config, level, num_tokens) for level in ("full", "offload"))
    of_input = num_tokens * SIZES["hidden_size"] * 2
    shape = shape_of_config(config, "a test")
    costs = [CostModel(shape=shape, checkpointing=level) for level in ("full", "offload")]
    working = [working_bytes_per_token(cost, shape.kinds[0], cost.levels[0]) for cost in costs]
    assert (working[1] - working[0]) * num_tokens == 2 * of_input
    saved = full - offload
    assert (num_layers - 2) * of_input <= saved <= (num_layers - 1) * of_input


def test_what_a_run_that_raised_left_behind_reaches_no_other(tiny_config, handmade_plan, random_sequences):
    config = AutoConfig.for_model(**tiny_config("llama", num_hidden_layers=3))
    model = new_model(config, torch.float64, seed=3)
    work = work_of(handmade_plan, random_sequences, 4)

    def gradients():
        executor = RankExecutor(model)
        executor.run(work, 30)
        found = [weight.grad.clone() for weight in model.model.parameters() if weight.grad is not None]
        model.model.zero_grad()
        return found

    expected = gradients()
    model.set_checkpointing("offload")

    def fail(action):
        if action.op == "backward":
            raise RuntimeError("here")
        return torch.enable_grad()

    with pytest.raises(RuntimeError, match="here"):
        RankExecutor(model).run(work, 30, fail)
    model.model.zero_grad()
    for _ in range(2):
        for found, plain in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(found, plain, rtol=1e-13, atol=1e-15)
