"""Adapters train through chunks as through whole sequences; dropout is drawn alike whenever a chunk runs forward."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoConfig

from chunkplan.cost.memory import activation_bytes_per_token
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import shape_of_config
from chunkplan.errors import UsageError
from chunkplan.extras import pip_install
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import ChunkTensors, PlanStream, open_plan
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.layout import Span
from chunkplan_runtime.models.model import load_model, new_model
from chunkplan_runtime.models.trained import add_lora, in_4bit, num_weights, without_adapters
from chunkplan_runtime.parity import compare_plan

EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
}
LATENTS = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
CHUNKS = [[(0, 0, 6)], [(0, 6, 12), (1, 0, 4)], [(0, 12, 18)], [(0, 18, 23)], [(2, 0, 9)]]


@pytest.fixture
def adapted(tiny_config):
    def make(dropout=0.0, **options):
        model = new_model(AutoConfig.for_model(**tiny_config("qwen2")), torch.float64, seed=3)
        model = add_lora(model, rank=2, alpha=4, dropout=dropout, **options)
        torch.manual_seed(1)
        for name, parameter in model.model.named_parameters():
            if "lora_B" in name:  # peft starts them at zero, where the gradients of their partners vanish
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    return make


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "lm_head", "down_proj"), ("lm_head",)])
def test_gradients_of_adapters_are_exact(adapted, handmade_plan, random_sequences, checkpointing, targets):
    model = adapted(targets=targets)
    if checkpointing:
        model.set_checkpointing("full")
    report = compare_plan(*handmade_plan(random_sequences([23, 4, 9]), [{0: CHUNKS}], k=2), model)
    assert report.max_relative_error <= 1e-12
    assert report.relative_errors
    assert all("lora_" in name for name in report.relative_errors)
    assert ("lm_head" in " ".join(report.relative_errors)) == ("lm_head" in targets)


def test_gradients_of_adapters_on_weights_in_4_bits_are_those_of_whole_sequences(
    tiny_config, handmade_plan, random_sequences, tmp_path
):
    """To the rounding of float32, in which bitsandbytes computes them."""
    pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")
    config = AutoConfig.for_model(**tiny_config("llama", hidden_size=64, intermediate_size=128))
    new_model(config, torch.float32, seed=3).model.save_pretrained(tmp_path)
    how = in_4bit(torch.float32, torch.device("cpu"))
    model = add_lora(load_model(str(tmp_path), config, torch.float32, **how), rank=2, alpha=4)
    for name, parameter in model.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    matrices = [each for each in model.model.parameters() if each.dtype == torch.uint8]
    assert sum(map(num_weights, matrices)) == 2 * (64 * (2 * 32 + 2 * 16) + 3 * 64 * 128)
    sequences = random_sequences([23, 4, 9])
    whole = [[(0, 0, 23)], [(1, 0, 4)], [(2, 0, 9)]]
    _, expected = gradients(model, *handmade_plan(sequences, [{0: whole}]))
    _, found = gradients(model, *handmade_plan(sequences, [{0: CHUNKS}], k=2))
    assert len(expected) == 28 and all("lora_" in name for name in expected)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def gradients(model, plan, analysis, seed=0):
    stream = PlanStream(*open_plan(plan, analysis), vocab_size=97, max_positions=256)
    work = next(iter(stream))
    executor = RankExecutor(model, seed=seed)
    loss = sum(executor.run(rank, work.step.num_target_tokens).loss for rank in work.ranks)
    found = {name: value.grad for name, value in model.model.named_parameters() if value.requires_grad}
    model.model.zero_grad()
    return loss, found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_dropout_gradients_are_the_same_bits_whatever_k(adapted, handmade_plan, random_sequences, checkpointing):
    model = adapted(dropout=0.3)
    if checkpointing:
        model.set_checkpointing("full")
    sequences, by_k = random_sequences([23, 4, 9]), []
    for k in (1, 2, 4):
        torch.manual_seed(k)  # what was drawn before does not matter
        by_k.append(gradients(model, *handmade_plan(sequences, [{0: CHUNKS}], k=k)))
    for loss, found in by_k[1:]:
        assert loss == by_k[0][0]
        assert all(torch.equal(found[name], by_k[0][1][name]) for name in found)
    plan = handmade_plan(sequences, [{0: CHUNKS}])
    assert gradients(model, *plan, seed=1)[0] != by_k[0][0]
    assert gradients(adapted(), *plan)[0] != by_k[0][0]


def activations(config, dtype, rank):
    """Bytes that the forward of a chunk of 23 tokens keeps for its backward, of each token: of tensors, each once."""
    model = new_model(AutoConfig.for_model(**config), dtype, seed=3)
    model = add_lora(model, rank=rank, alpha=4) if rank else model
    weights = {parameter.untyped_storage()._cdata for parameter in model.model.parameters()}
    kept = {}

    def keep(saved):
        storage = saved.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return saved

    tensors = chunk_of(23)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        model.hidden_states(tensors, KVStore(23))
    return sum(storage.nbytes() for storage in kept.values()) / 23


def chunk_of(num_tokens):
    places = torch.arange(num_tokens, dtype=torch.int32)[None]
    span = Span(0, 0, num_tokens, num_tokens, 0, None)
    return ChunkTensors(0 * places, places, torch.zeros(num_tokens, dtype=torch.int64), (span,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_the_planner_predicts_what_layers_keep_for_a_backward_with_adapters_and_without(
    tiny_config, model_type, rank, dtype
):
    """Of a layer, to the byte."""
    sizes = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16}
    one, three = (
        activations(tiny_config(model_type, num_hidden_layers=layers, **sizes), dtype, rank) for layers in (1, 3)
    )
    shape = shape_of_config(tiny_config(model_type, **sizes), "a test")
    cost = CostModel(shape=shape, lora_rank=rank, precision="fp32" if dtype == torch.float32 else "bf16")
    predicted = activation_bytes_per_token(cost, shape.kinds[0])
    assert (three - one) / 2 == predicted


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"model_type": "llama"}, 0),
        ({"model_type": "qwen2"}, 0),
        ({"model_type": "qwen3"}, 0),
        ({"model_type": "olmo2"}, 0),
        ({"model_type": "falcon_h1", "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, 0.1),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, 0.1),
        ({"model_type": "qwen3_moe", **EXPERTS}, 0),
        ({"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 24}, 0),
        ({"model_type": "mixtral", **EXPERTS}, 0),
        ({"model_type": "gpt_oss", **EXPERTS, "sliding_window": 8}, 0),
        ({"model_type": "glm4_moe", **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}, 0),
        ({"model_type": "granitemoe", **EXPERTS}, 0),
        ({"model_type": "llama4_text", **EXPERTS, "intermediate_size_mlp": 48}, 0),
        ({"model_type": "deepseek_v3", **EXPERTS, **LATENTS, "n_routed_experts": 4, "first_k_dense_replace": 1}, 0.15),
        ({"model_type": "qwen3_next", **EXPERTS, "layer_types": ["linear_attention", "full_attention"]}, 0.15),
    ],
)
def test_the_planner_counts_the_adapters_that_the_trainer_makes(tiny_config, changes, tolerance):
    """Exactly where queries are grouped and projected one by one. With experts there are only those of attention."""
    config = AutoConfig.for_model(**tiny_config(**changes))
    model = add_lora(new_model(config, torch.float32, seed=3), rank=3, alpha=4)
    made = sum(parameter.numel() for parameter in model.model.parameters() if parameter.requires_grad)
    cost = CostModel(shape=shape_of_config(config.to_dict(), "a test"), lora_rank=3)
    assert cost.shape.total(cost.adapters.trained_parameters) == pytest.approx(made, rel=tolerance, abs=0)


def test_experts_of_a_config_that_names_them_elsewhere_get_no_adapters():
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64}
    experts = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}
    attention = {"kv_n_heads": 2, "rope_theta": 1e4}
    config = AutoConfig.for_model("dbrx", **sizes, attn_config=attention, ffn_config=experts)
    model = add_lora(new_model(config, torch.float32, seed=3), rank=3, alpha=4)
    adapted = [name for name, weight in model.model.named_parameters() if weight.requires_grad]
    assert adapted and all(".attn." in name for name in adapted)


def test_layers_that_are_named_and_get_no_adapter_are_said(tiny_config):
    """In a model with experts peft takes the names of their projections for these alone."""
    config = AutoConfig.for_model(**tiny_config("qwen3_moe", **EXPERTS, mlp_only_layers=[0]))

    def said(*targets):
        model = add_lora(new_model(config, torch.float32, seed=3), rank=3, alpha=4, targets=targets)
        return without_adapters(model, targets)

    assert said("all-linear") is None and said("q_proj", "lm_head") is None
    names = ("gate_proj", "up_proj", "down_proj")
    expected = "no adapters for model.layers.0.mlp.gate_proj and 2 more layers: peft takes these names for the experts"
    assert said(*names).startswith(expected)
    with pytest.raises(UsageError, match="no layer of it is named no_such, q_pro\n") as raised:
        said("q_proj", "no_such", "q_pro", *names)
    assert "gate_proj,up_proj,down_proj" in raised.value.hint


def test_running_a_step_leaves_the_random_numbers_of_others_alone(adapted, handmade_plan, random_sequences):
    plan = handmade_plan(random_sequences([23, 4, 9]), [{0: CHUNKS}])
    model = adapted(dropout=0.3)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    gradients(model, *plan)
    assert torch.equal(torch.rand(3), expected)


def test_all_layers_and_names_are_not_given_together(adapted):
    with pytest.raises(UsageError, match="all-linear stands for all layers that get one"):
        adapted(targets=("all-linear", "lm_head"))


def test_a_layer_that_is_not_there_and_peft_that_is_not_are_named(adapted, monkeypatch):
    with pytest.raises(UsageError, match="no_such_proj"):
        adapted(targets=("no_such_proj",))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match="peft") as raised:
        adapted()
    assert pip_install("lora") in raised.value.hint
