"""Chunked gradients equal those of whole sequences, and the comparison notices when they do not."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from chunkplan import PlanConfig, build, build_like
from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.planfile.load import load_plan
from chunkplan_runtime.execution import executor
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.layout import Span
from chunkplan_runtime.models.checks import MODEL_TYPES, check_config
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.parity import compare_plan, parity
from chunkplan_runtime.proof.prove import relative_errors, vanishing_gradients
from tests.support.analyses import write_analysis
from tests.support.mixed_chunks import LENGTHS, MIXED

MODELS = {
    "llama": {"model_type": "llama"},
    "llama with biases, tied": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama, llama3 rope": {
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied, yarn": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "qwen3": {"model_type": "qwen3"},
    "qwen3, wide heads, one KV head": {"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 1},
    "mistral, as many KV heads": {"model_type": "mistral", "num_key_value_heads": 4},
    "mistral, sliding window": {"model_type": "mistral", "sliding_window": 6},
    "qwen2, every second layer sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 10,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gemma": {"model_type": "gemma", "rms_norm_eps": 1e-6, "final_logit_softcapping": 2.0},
    "llama, entries of other models": {
        "model_type": "llama",
        "final_logit_softcapping": 2.0,
        "use_bidirectional_attention": True,
        "sliding_window": 7,
    },
    "qwen2_moe, every second layer sliding, told by the mask alone": {
        "model_type": "qwen2_moe",
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "smollm3, sliding by its layers": {
        "model_type": "smollm3",
        "pad_token_id": None,
        "use_sliding_window": False,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2, softcaps and sliding window": {"model_type": "gemma2", "sliding_window": 9, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    },
    "gemma3_text, full attention": {
        "model_type": "gemma3_text",
        "sliding_window": 8,
        "layer_types": ["full_attention"] * 2,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {"model_type": "olmo2"},
    "phi3, sliding window": {"model_type": "phi3", "sliding_window": 11, "pad_token_id": None},
    "smollm3": {"model_type": "smollm3", "pad_token_id": None, "no_rope_layers": [1, 0]},
    "granite, scaled logits": {"model_type": "granite", "logits_scaling": 8.0, "embedding_multiplier": 3.0},
    "gpt_oss, sinks": {
        "model_type": "gpt_oss",
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v3, latents": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}


#: One of each kind, which run outside of soak.
FEW = ("llama, llama3 rope", "qwen2", "mistral, sliding window", "gpt_oss, sinks", "deepseek_v3, latents", "qwen3_moe")
FEW_TYPES = ("gemma3_text", "mistral", "qwen2", "qwen3_moe", "smollm3")


def few_of(names, few):
    """`names`, of which those outside of `few` are soak tests."""
    return [pytest.param(name, marks=() if name in few else pytest.mark.soak) for name in names]


NOISY = {
    "mixtral, jitter of routers": {"model_type": "mixtral", "num_local_experts": 4, "router_jitter_noise": 0.3},
    "phimoe, experts that are drawn": {"model_type": "phimoe", "num_local_experts": 4, "router_jitter_noise": 0.9},
}


@pytest.fixture
def model(tiny_config):
    def make(name="qwen2", **changes):
        config = AutoConfig.for_model(**tiny_config(**MODELS[name], **changes))
        check_config(config, name)
        return new_model(config, torch.float64, seed=1)

    return make


def assert_exact(report):
    assert report.max_relative_error <= 1e-12
    assert report.passed
    assert report.loss == pytest.approx(report.reference_loss, rel=1e-13)


@pytest.mark.parametrize(
    ("k", "kv_offload", "checkpointing"),
    [
        pytest.param(1, True, False, marks=pytest.mark.soak),
        pytest.param(2, False, True, marks=pytest.mark.soak),
        (2, True, True),
        pytest.param(5, False, False, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("name", few_of(MODELS, FEW))
def test_mixed_and_packed_and_dependent_chunks_are_exact_for_every_model(
    name, k, kv_offload, checkpointing, model, handmade_plan, random_sequences
):
    plan, analysis = handmade_plan(random_sequences(LENGTHS), [{0: MIXED}], k=k)
    run = model(name)
    if checkpointing:
        run.set_checkpointing("full")
    report = compare_plan(plan, analysis, run, kv_offload=kv_offload)
    assert_exact(report)
    assert report.chunks == {"standalone": 1, "dependent": 4, "mixed": 2}


@pytest.mark.parametrize("name", NOISY)
def test_models_that_draw_noise_in_training_are_compared_without(
    name, model, tiny_config, handmade_plan, random_sequences, monkeypatch
):
    monkeypatch.setitem(MODELS, name, NOISY[name])
    plan, analysis = handmade_plan(random_sequences(LENGTHS), [{0: MIXED}], k=2)
    run = model(name)
    assert_exact(compare_plan(plan, analysis, run))
    assert run.model.training


@pytest.mark.parametrize("chunk_size", few_of([1, 2, 7, 16, 31, 1000], (1, 7, 1000)))
@pytest.mark.parametrize("k", [1, pytest.param(2, marks=pytest.mark.soak), 100])
def test_plans_of_the_planner_are_exact(chunk_size, k):
    lengths = [11, 5, 1, 2, 17] if chunk_size < 3 else [40, 5, 64, 1, 2, 17, 32]
    report = parity(lengths, chunk_size, k)
    assert_exact(report)
    assert sum(report.chunks.values()) >= sum(-(-length // chunk_size) for length in lengths if length > chunk_size)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6).filter(lambda lengths: max(lengths) > 1),
    chunk_size=st.integers(3, 45),
    k=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_any_lengths_are_exact(lengths, chunk_size, k, seed):
    assert_exact(parity(lengths, chunk_size, k, seed=seed))


def test_parity_takes_a_model_config(tmp_path, tiny_config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config("qwen3", torch_dtype="bfloat16")))
    report = parity([20, 4], 6, 2, model=path)
    assert_exact(report)
    assert any("q_norm" in name for name in report.relative_errors)


#: What a config may say of sliding windows: of each model type some is what it does, and the rest is not.
WINDOWS = {
    "a window": {"sliding_window": 7},
    "a window and kinds of layers": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7},
    "a window and full attention": {"layer_types": ["full_attention"] * 2, "sliding_window": 7},
    "a window in every layer": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7},
    "kinds of layers alone": {"layer_types": ["full_attention", "sliding_attention"]},
}


@pytest.mark.parametrize("used", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["used", "not used"])
@pytest.mark.parametrize("said", WINDOWS)
@pytest.mark.parametrize("model_type", few_of(MODEL_TYPES, FEW_TYPES))
def test_a_sliding_window_is_that_of_transformers_or_refused(
    model_type, said, used, tiny_config, handmade_plan, random_sequences
):
    """Whatever a config says of it, by comparison with the whole sequences through transformers' own attention."""
    moe = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 3}
    more = {**(moe if "moe" in model_type or model_type == "mixtral" else {}), "pad_token_id": None}
    config = AutoConfig.for_model(
        **tiny_config(model_type, **{**more, **WINDOWS[said], "use_sliding_window": used, "max_window_layers": 1})
    )
    try:
        check_config(config, model_type)
    except UsageError as error:
        assert "layer_types" in WINDOWS[said] and error.hint
        return
    plan, analysis = handmade_plan(random_sequences([12]), [{0: [[(0, 0, 8)], [(0, 8, 12)]]}])
    assert_exact(compare_plan(plan, analysis, new_model(config, torch.float64, seed=1)))


@pytest.mark.parametrize("kv_offload", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma2, softcaps and sliding window"])
def test_a_prefix_of_many_pages_is_exact(name, kv_offload, monkeypatch, model, handmade_plan, random_sequences):
    monkeypatch.setattr(executor, "PAGE_CHUNKS", 0)  # every part has a page of its own
    plan, analysis = handmade_plan(random_sequences(LENGTHS), [{0: MIXED}], k=2)
    assert_exact(compare_plan(plan, analysis, model(name), kv_offload=kv_offload))


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text, full attention"])
def test_a_model_that_looks_both_ways_runs_unsplit_plans_only(name, model, handmade_plan, random_sequences):
    bidirectional = model(name, **({"is_causal": False} if name == "qwen2" else {"use_bidirectional_attention": True}))
    whole = [[(0, 0, 23)], [(1, 0, 5), (2, 0, 9), (3, 0, 3)], [(4, 0, 30), (5, 0, 1), (6, 0, 8)]]
    plan, analysis = handmade_plan(random_sequences(LENGTHS), [{0: whole}])
    report = compare_plan(plan, analysis, bidirectional)
    assert_exact(report)
    causal = compare_plan(plan, analysis, model(name))
    assert abs(causal.loss - report.loss) > 1e-6
    split, analysis = handmade_plan(random_sequences(LENGTHS), [{0: MIXED}])
    with pytest.raises(UsageError, match="the plan splits sequences") as raised:
        compare_plan(split, analysis, bidirectional)
    assert "--no-split" in raised.value.hint


def test_a_target_across_a_chunk_border_counts(model, handmade_plan):
    target = np.zeros(12, bool)
    target[4] = True  # predicted by the last token of the first chunk
    plan, analysis = handmade_plan([(np.arange(12), target)], [{0: [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 12)]]}])
    report = compare_plan(plan, analysis, model())
    assert_exact(report)
    assert report.loss > 1


def test_two_ranks_on_one_process_are_exact(tmp_path, model, handmade_plan, random_sequences):
    plan, analysis = handmade_plan(random_sequences(LENGTHS), [{0: MIXED[:3], 1: [[]], 2: [[], *MIXED[3:]]}], k=2, dp=3)
    report = compare_plan(plan, analysis, model())
    assert_exact(report)
    assert report.chunks["zero_loss"] == 2
    build(analysis, tmp_path / "plan", PlanConfig(chunk_size=8, k=1, dp=2))
    assert_exact(compare_plan(tmp_path / "plan", analysis, model()))


@pytest.mark.parametrize("k", [1, 2, 100])
@pytest.mark.parametrize("name", ["qwen2", "gemma2, softcaps and sliding window"])
def test_a_plan_like_one_in_which_ranks_share_sequences_is_exact_on_one_process(
    tmp_path, name, k, model, random_sequences
):
    write_analysis(tmp_path / "analysis", random_sequences([90, 20, 3, 14]))
    build(tmp_path / "analysis", tmp_path / "plan", PlanConfig(chunk_size=6, k=k, dp=4, cp="auto", global_batch=4))
    [step] = load_plan(tmp_path / "plan").iter_steps()
    sizes = {chunk.cp_size for chunks in step.chunks.values() for chunk in chunks}
    assert sizes == {1, 4}
    with pytest.raises(UsageError, match="as many replicas as it has ranks, 4, not 1"):
        compare_plan(tmp_path / "plan", tmp_path / "analysis", model(name))
    build_like(tmp_path / "plan", tmp_path / "like", dp=1)
    assert_exact(compare_plan(tmp_path / "like", tmp_path / "analysis", model(name)))


def test_lost_kv_gradients_are_noticed(monkeypatch, model, handmade_plan, random_sequences):
    blocks = KVStore.blocks

    def lose(*asked):
        for block in blocks(*asked):
            yield block._replace(gradients=tuple(gradient.clone() for gradient in block.gradients))

    monkeypatch.setattr(KVStore, "blocks", lose)
    plan, analysis = handmade_plan(random_sequences(LENGTHS), [{0: MIXED}])
    report = compare_plan(plan, analysis, model())
    assert report.max_relative_error > 1e-4
    assert not report.passed


def test_a_lost_prefix_is_noticed(monkeypatch, model, handmade_plan, random_sequences):
    monkeypatch.setattr(Span, "first_seen", lambda part, *_: part.start)
    plan, analysis = handmade_plan(random_sequences(LENGTHS), [{0: MIXED}])
    assert not compare_plan(plan, analysis, model()).passed


def test_gradients_that_are_not_finite_are_no_success(tmp_path, tiny_config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config("qwen2", initializer_range=1e200)))
    with pytest.raises(ChunkplanError, match="not finite"):
        parity([20, 4], 6, 2, model=path)


def test_parity_refuses_layers_that_a_model_does_not_go_by(tmp_path, tiny_config):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(tiny_config("qwen3_moe", **WINDOWS["a window and kinds of layers"], use_sliding_window=True))
    )
    with pytest.raises(
        UsageError, match="layer_types has full_attention and sliding_attention, which a qwen3_moe"
    ) as raised:
        parity([20, 4], 6, 2, model=path)
    assert raised.value.where == str(path)


@pytest.mark.parametrize("lengths", [[], [0, 5], [1, 1]])
def test_lengths_that_cannot_be_compared_are_refused(lengths):
    with pytest.raises(UsageError, match="at least two"):
        parity(lengths, 4, 1)


def test_a_small_gradient_is_held_to_its_own_norm():
    """Only one that is zero but for rounding is measured against all parameters together, and is named."""
    reference = {"large": torch.full((4,), 1.0), "small": torch.full((4,), 1e-12), "none": torch.full((4,), 1e-16)}
    gradients = {"large": torch.full((4,), 1.0), "small": torch.full((4,), 2e-12), "none": torch.full((4,), 2e-16)}
    reference, gradients = ({name: value.double() for name, value in each.items()} for each in (reference, gradients))
    assert vanishing_gradients(reference) == ["none"]
    errors = relative_errors(gradients, reference, ["none"])
    assert errors["large"] == 0
    assert errors["small"] == pytest.approx(1)
    assert 0 < errors["none"] < 1e-15
