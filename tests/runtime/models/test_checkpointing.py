"""Levels of activation checkpointing: gradients are exact at each, and what is held is what the planner counts."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from chunkplan.cost.checkpointing import CHECKPOINTINGS
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.parity import compare_plan

CHUNKS = [[(0, 0, 6)], [(0, 6, 12), (1, 0, 4)], [(0, 12, 18)], [(0, 18, 23)], [(2, 0, 9)]]
LEVELS = CHECKPOINTINGS[1:]
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
ROUTED = {
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
MODELS = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 8},
    "olmo2": {},
    "qwen3_moe": ROUTED,
    "mixtral": ROUTED,
    "llama4_text": {**ROUTED, "intermediate_size_mlp": 40},
    "gpt_oss": {**ROUTED, "sliding_window": 8},
    "deepseek_v3": {
        **ROUTED,
        **LATENT,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "head_dim": 8,
    },
    "qwen3_next": {
        **ROUTED,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 16,
        "num_hidden_layers": 4,
    },
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "attn_layer_indices": [1],
        "mamba_chunk_size": 8,
    },
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model_type", MODELS)
def test_gradients_are_exact_at_every_level(tiny_config, handmade_plan, random_sequences, model_type, level):
    config = AutoConfig.for_model(**tiny_config(model_type, **MODELS[model_type]))
    model = new_model(config, torch.float64, seed=3)
    model.set_checkpointing(level)
    plan = handmade_plan(random_sequences([23, 4, 9]), [{0: CHUNKS}], k=2)
    report = compare_plan(*plan, model, kv_offload=level == "keep-projections")
    assert report.max_relative_error <= 1e-11
