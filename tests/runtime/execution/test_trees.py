"""What sequences of a step begin with alike is run once, and gradients and losses are those of whole sequences."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoConfig

from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.tiny import tiny_document
from chunkplan_runtime.parity import compare_plan
from tests.runtime.attention.test_latents import SHARING
from tests.runtime.test_parity import MODELS
from tests.support.tree_cases import random_tree_plan

NAMES = (
    *("qwen2", "gpt_oss, sinks", "deepseek_v3, latents", "gemma2, softcaps and sliding window", "qwen3_moe"),
    *("gemma3n_text, layers that share keys and values", "llama4_text, tiles"),
)


@pytest.fixture
def model(tiny_config):
    def make(name, **changes):
        if name in MODELS:
            document = tiny_config(**MODELS[name], **changes)
        else:
            document = tiny_document(AutoConfig.for_model(name.partition(",")[0]).to_dict())
            document |= {"vocab_size": 97, "attn_temperature_tuning": False}
            if name.startswith("gemma3n"):
                document |= SHARING | {"intermediate_size": [48] * 5, "activation_sparsity_pattern": [0.0] * 5}
        return new_model(AutoConfig.for_model(**document), torch.float64, seed=3)

    return make


@pytest.mark.parametrize("kv_offload", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_trees_are_exact_however_they_are_cut(name, kv_offload, model, handmade_plan):
    """Of one to three levels, in chunks of any size, whole in one beside other sequences, with any chunks kept."""
    for seed in range(4):
        plan, analysis = random_tree_plan(random.Random(f"{name} {seed}"), handmade_plan)
        report = compare_plan(plan, analysis, model(name), kv_offload=kv_offload)
        assert report.max_relative_error < 1e-12, seed
        assert report.loss == pytest.approx(report.reference_loss, rel=1e-12)
