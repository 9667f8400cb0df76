"""Levels of activation checkpointing: gradients are exact at each, and what is held is what the planner counts."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from transformers import AutoConfig

from chunkplan.cost.activations import activation_bytes_per_token
from chunkplan.cost.checkpointing import CHECKPOINTINGS
from chunkplan.cost.memory import memory_rates as bytes_of_stages
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import shape_of_config
from chunkplan.errors import UsageError
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.trained import add_lora
from chunkplan_runtime.parity import compare_plan
from tests.support.alive import held_bytes

CHUNKS = [[(0, 0, 6)], [(0, 6, 12), (1, 0, 4)], [(0, 12, 18)], [(0, 18, 23)], [(2, 0, 9)]]

ROUTED = {
    "num_experts": 16,
    "n_routed_experts": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
MODELS = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 8},
    "olmo2": {},
    "qwen3_moe": ROUTED,
    "llama4_text": {**ROUTED, "intermediate_size_mlp": 40},
    "gpt_oss": {**ROUTED, "sliding_window": 8},
    "deepseek_v3": {**ROUTED, **LATENT},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 32},
}


#: One level of each model, and all of one model, are always tried; `make soak` has all of all.
LEVELS = [
    pytest.param(name, level, marks=() if name == "qwen3" or number % 4 == place else pytest.mark.soak)
    for number, name in enumerate(MODELS)
    for place, level in enumerate(CHECKPOINTINGS[1:])
]


@pytest.mark.parametrize(("model_type", "level"), LEVELS)
def test_gradients_are_exact_at_every_level(tiny_config, handmade_plan, random_sequences, model_type, level):
    """With K below the number of chunks, and offloaded at some levels."""
    config = AutoConfig.for_model(**tiny_config(model_type, **MODELS[model_type]))
    model = new_model(config, torch.float64, seed=3)
    model.set_checkpointing(level)
    plan = handmade_plan(random_sequences([23, 4, 9]), [{0: CHUNKS}], k=2)
    report = compare_plan(*plan, model, kv_offload=level in ("keep-products", "keep-attention"))
    assert report.max_relative_error <= 1e-11


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(each, marks=() if each in ("qwen3", "deepseek_v3", "falcon_h1") else pytest.mark.soak)
        for each in MODELS
    ],
)
def test_gradients_are_exact_with_a_level_for_each_layer(tiny_config, handmade_plan, random_sequences, model_type):
    config = AutoConfig.for_model(**tiny_config(model_type, num_hidden_layers=5, **MODELS[model_type]))
    model = new_model(config, torch.float64, seed=3)
    model.set_checkpointing(",".join(f"{level}:1" for level in (CHECKPOINTINGS[3], *CHECKPOINTINGS[:3], "full")))
    plan = handmade_plan(random_sequences([23, 4, 9]), [{0: CHUNKS}], k=2)
    report = compare_plan(*plan, model, kv_offload=model_type != "falcon_h1")
    assert report.max_relative_error <= 1e-11


def test_levels_of_other_layers_than_the_model_has_are_refused(tiny_config):
    model = new_model(AutoConfig.for_model(**tiny_config("llama", num_hidden_layers=3)), torch.float64, seed=3)
    with pytest.raises(UsageError, match="of 4 layers: the model has 3"):
        model.set_checkpointing("full:1,none:3")


@pytest.mark.parametrize(
    "model_type", ["qwen3", *(pytest.param(each, marks=pytest.mark.soak) for each in ("qwen3_moe", "deepseek_v3"))]
)
def test_keys_and_values_are_written_once_where_attention_is_held(
    tiny_config, handmade_plan, random_sequences, model_type, monkeypatch
):
    """Three chunks of a sequence of four lose their activations, and write again when they are recomputed."""
    config = AutoConfig.for_model(**tiny_config(model_type, **MODELS[model_type]))
    plan, analysis = handmade_plan(random_sequences([23, 4, 9]), [{0: CHUNKS}], k=1)
    work = next(iter(PlanStream(*open_plan(plan, analysis), vocab_size=97, max_positions=256)))
    written = dict.fromkeys(CHECKPOINTINGS, 0)
    for level in CHECKPOINTINGS:
        model = new_model(config, torch.float64, seed=3)
        model.set_checkpointing(level)
        write = KVStore.write

        def count(*given, level=level, write=write, **how):
            written[level] += 1
            return write(*given, **how)

        with monkeypatch.context() as patch:
            patch.setattr(KVStore, "write", count)
            RankExecutor(model).run(work.ranks[0], work.step.num_target_tokens)
    layers = config.num_hidden_layers
    assert written == dict.fromkeys(CHECKPOINTINGS, 7 * layers) | dict.fromkeys(("full", "offload"), (7 + 4) * layers)


def held(config, dtype, rank, level):
    """Bytes of a token that are held after the forward of a chunk."""
    model = new_model(AutoConfig.for_model(**config), dtype, seed=3)
    model = add_lora(model, rank=rank, alpha=4) if rank else model
    model.set_checkpointing(level)
    return held_bytes(model)


@pytest.mark.parametrize("level", CHECKPOINTINGS)
@pytest.mark.parametrize(
    ("model_type", "rank"),
    [("qwen3", 0), ("qwen3_moe", 4)]
    + [
        pytest.param(*case, marks=pytest.mark.soak)
        for case in (*product(("llama", "deepseek_v3"), (0, 4)), ("qwen3", 4), ("qwen3_moe", 0))
    ],
)
def test_the_planner_predicts_what_layers_hold_at_each_level(tiny_config, model_type, rank, level):
    """No less than is measured, and no more than a tenth above that."""
    sizes = {"hidden_size": 128, "intermediate_size": 336, "head_dim": 32, **MODELS[model_type]}
    few, more = (
        held(tiny_config(model_type, num_hidden_layers=layers, **sizes), torch.bfloat16, rank, level)
        for layers in (2, 4)
    )
    shape = shape_of_config(tiny_config(model_type, num_hidden_layers=4, **sizes), "a test")
    cost = CostModel(shape=shape, lora_rank=rank, checkpointing=level)
    predicted = activation_bytes_per_token(cost, shape.kinds[0])
    measured = (more - few) / 2
    assert measured <= predicted <= 1.1 * measured


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("mixed", ["full:2,none:2", "keep-attention:1,none:1,keep-products:2"])
def test_the_planner_predicts_what_a_stage_holds_of_layers_with_several_levels(tiny_config, model_type, mixed):
    """No less than is measured, and no more than a tenth above that."""
    sizes = {"hidden_size": 128, "intermediate_size": 336, "head_dim": 32, **MODELS[model_type]}
    measured = held(tiny_config(model_type, num_hidden_layers=4, **sizes), torch.bfloat16, 0, mixed)
    shape = shape_of_config(tiny_config(model_type, num_hidden_layers=4, **sizes), "a test")
    predicted = bytes_of_stages(CostModel(shape=shape, checkpointing=mixed), 1, (4,), 64).tokens[0, 0]
    assert measured <= predicted <= 1.1 * measured
