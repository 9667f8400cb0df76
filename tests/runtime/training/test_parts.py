"""Parts of training by themselves: schedules, master weights, the optimizer, FLOPs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, TrainingArguments, get_scheduler

from chunkplan_runtime.distributed.job import clip, gradient_norm
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.trained import add_lora
from chunkplan_runtime.training.config import LR_SCHEDULES, TrainConfig
from chunkplan_runtime.training.metrics import FlopCounter
from chunkplan_runtime.training.optimizer import TrainedWeights, make_optimizer
from chunkplan_runtime.training.trainer import _config_identity

CONFIG = TrainConfig(plan=Path("p"), output=Path("o"), model="m")


#: What transformers calls each schedule; it has no lowest rate but that of the cosine.
TRANSFORMERS = {
    ("constant", 0.0): ("constant_with_warmup", {}),
    ("linear", 0.0): ("linear", {}),
    ("cosine", 0.0): ("cosine", {}),
    ("cosine", 0.1): ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
}


@pytest.mark.parametrize(("schedule", "lowest"), TRANSFORMERS)
@pytest.mark.parametrize("warmup", [0, 1, 2, 7, 10, 0.03, 0.25, 39, 40, 100])
def test_the_rate_of_every_step_is_that_of_transformers(schedule, lowest, warmup):
    """To the last bit, from the first step on; the share of a warm-up is taken as its arguments take it."""
    name, more = TRANSFORMERS[schedule, lowest]
    num_warmup = TrainingArguments(warmup_steps=warmup, use_cpu=True).get_warmup_steps(40)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    theirs = get_scheduler(name, optimizer, num_warmup, 40, scheduler_specific_kwargs=more or None)
    for step in range(40):
        rate = replace(CONFIG, lr=3e-4, lr_schedule=schedule, warmup=warmup, min_lr=lowest).learning_rate(step, 40)
        assert rate == theirs.get_last_lr()[0], step
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("schedule", LR_SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 10, 0.25, 100])
def test_a_rate_rises_once_then_never_and_stays_within_its_bounds(schedule, warmup):
    config = replace(CONFIG, lr=1.0, lr_schedule=schedule, warmup=warmup, min_lr=0.1)
    factors = [config.learning_rate(step, 40) for step in range(40)]
    top = min({0.25: 10}.get(warmup, warmup), 40)
    rise, fall = factors[:top], factors[top:]
    assert rise == [step / (10 if warmup == 0.25 else warmup) for step in range(top)]
    assert all(before >= after for before, after in pairwise(fall))
    assert all(0.1 <= factor <= 1 for factor in fall)
    if fall:
        assert fall[0] == 1


def test_a_lowest_rate_is_where_a_schedule_ends():
    configs = {name: replace(CONFIG, lr=1.0, lr_schedule=name, warmup=20, min_lr=0.2) for name in LR_SCHEDULES}
    at = {name: config.learning_rate(30, 40) for name, config in configs.items()}
    assert at == {"constant": 1, "linear": pytest.approx(0.6), "cosine": pytest.approx(0.6)}
    ends = {name: config.learning_rate(40, 40) for name, config in configs.items()}
    assert ends == {"constant": 1, "linear": pytest.approx(0.2), "cosine": pytest.approx(0.2)}


def test_norms_and_biases_do_not_decay_and_everything_learns(tiny_config):
    model = new_model(AutoConfig.for_model(**tiny_config("qwen2")), torch.float32, 0)
    weights = TrainedWeights(model.model, master_weights=True).tensors
    optimizer = make_optimizer(weights, replace(CONFIG, lr=1e-2, weight_decay=0.5))
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for name, weight in weights.items():
        kept = name.endswith("bias") or "norm" in name
        torch.testing.assert_close(weight.detach(), before[name] * (1 if kept else 1 - 0.5e-2))
        assert not kept or torch.equal(weight.detach(), before[name])
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert all(bool((weight.detach() < before[name]).all()) for name, weight in weights.items() if "norm" in name)
    groups = [weight for group in optimizer.param_groups for weight in group["params"]]
    assert {id(weight) for weight in groups} == {id(weight) for weight in weights.values()}


def gradients(model, weights, plan, analysis):
    stream = PlanStream(*open_plan(plan, analysis), vocab_size=97, max_positions=1024)
    [work] = list(stream)
    RankExecutor(model).run(work.ranks[0], work.step.num_target_tokens)
    return {name: weight.grad.double() for name, weight in weights.items()}


def test_gradients_of_many_chunks_add_up_in_float32(tiny_config, handmade_plan, random_sequences):
    """Of 64: against float64, fp32 master weights have two thirds of the error of bfloat16, and less in each weight."""
    config = AutoConfig.for_model(**tiny_config("llama", max_position_embeddings=1024))
    sequences = random_sequences([16] * 64, seed=2)
    plan, analysis = handmade_plan(sequences, [{0: [[(index, 0, 16)] for index in range(64)]}])
    errors = {}
    exact = new_model(config, torch.float32, 0)
    exact.model.to(torch.bfloat16).double()  # the very weights of the others
    reference = gradients(exact, dict(exact.model.named_parameters()), plan, analysis)
    for master_weights in (True, False):
        model = new_model(config, torch.float32, 0)
        model.model.to(torch.bfloat16)
        weights = TrainedWeights(model.model, master_weights=master_weights).tensors
        found = gradients(model, weights, plan, analysis)
        errors[master_weights] = {
            name: float((found[name] - reference[name]).norm() / reference[name].norm()) for name in reference
        }
        if master_weights:
            assert all(weight.dtype == torch.float32 for weight in weights.values())
            assert all(parameter.grad is None for parameter in model.model.parameters()), "freed at once"
    assert all(errors[True][name] < errors[False][name] for name in reference), errors
    mean = {master_weights: sum(found.values()) / len(found) for master_weights, found in errors.items()}
    assert mean[True] < 0.65 * mean[False]


def test_fp32_master_weights_keep_what_bfloat16_would_round_away(tiny_config):
    """A thousand updates, each too small to change a bfloat16 weight, change it in the end."""
    model = new_model(AutoConfig.for_model(**tiny_config("llama")), torch.bfloat16, 0)
    trained = TrainedWeights(model.model, master_weights=True)
    name = "model.norm.weight"
    parameter, master = dict(model.model.named_parameters())[name], trained.tensors[name]
    assert torch.equal(parameter, torch.ones_like(parameter))
    for _ in range(1000):
        with torch.no_grad():
            master -= 1e-4
        trained.publish()
    assert master.mean().item() == pytest.approx(0.9, abs=1e-3)
    assert parameter.float().mean().item() == pytest.approx(0.9, abs=2e-3)


def test_the_norm_of_large_gradients_is_not_that_of_float32_sums(monkeypatch):
    """Three million values in one tensor or in three, looked at in pieces: the same to the last digits of float32."""
    monkeypatch.setattr("chunkplan_runtime.distributed.job.NUMBERS_AT_ONCE", 1_000_000)
    whole, parts = torch.nn.Parameter(torch.zeros(3 << 20)), [torch.nn.Parameter(torch.zeros(1 << 20)) for _ in "abc"]
    whole.grad = torch.randn(3 << 20, generator=torch.Generator().manual_seed(0)) * 1e-3
    for part, gradient in zip(parts, whole.grad.split(1 << 20), strict=True):
        part.grad = gradient
    exact = whole.grad.double().norm().item()
    norm = gradient_norm({"whole": whole}, None, None)
    assert norm.item() == pytest.approx(exact, rel=1e-12)
    apart = gradient_norm(dict(zip("abc", parts, strict=True)), None, None)
    assert apart.item() == pytest.approx(exact, rel=1e-12)
    clip([whole], norm, 0.5)
    assert whole.grad.double().norm().item() == pytest.approx(0.5, rel=1e-5)


def test_only_what_is_trained_is_in_the_weights(tiny_config):
    model = new_model(AutoConfig.for_model(**tiny_config("llama")), torch.bfloat16, 0)
    for name, parameter in model.model.named_parameters():
        parameter.requires_grad_("norm" in name)
    weights = TrainedWeights(model.model, master_weights=True).tensors
    assert weights and all("norm" in name for name in weights)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 5}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    ],
)
def test_flops_are_six_a_weight_and_token_and_those_of_the_pairs_seen(
    tiny_config, handmade_plan, random_sequences, kind, changes
):
    """However the sequence is split."""
    model = new_model(AutoConfig.for_model(**tiny_config(kind, **changes)), torch.float32, 0)
    lengths = [23, 4, 9]
    chunks = [[(0, 0, 8)], [(0, 8, 16)], [(0, 16, 23)], [(1, 0, 4)], [(2, 0, 9)]]
    plan, analysis = handmade_plan(random_sequences(lengths), [{0: chunks}])
    work = next(iter(PlanStream(*open_plan(plan, analysis), vocab_size=97, max_positions=256)))
    heads = 32 * (2 * 32 + 2 * 16)
    mlp = 3 * 32 * (2 * 24 if kind == "qwen3_moe" else 48) + (4 * 32 if kind == "qwen3_moe" else 0)
    window = changes.get("sliding_window", 10**9)
    squares = sum(2 * sum(min(place + 0.5, window) for place in range(length)) for length in lengths)
    expected = 6 * (36 * (2 * (heads + mlp) + 32 * 97) + 2 * 32 * squares)
    assert FlopCounter(model).count(work.step) == pytest.approx(expected, rel=0.01)


def test_frozen_weights_count_four_flops_and_adapters_six(tiny_config, handmade_plan, random_sequences):
    """Those of seven adapters of rank 4 in each of two layers, and of attention as ever."""
    model = new_model(AutoConfig.for_model(**tiny_config("llama")), torch.float32, 0)
    whole = flops(model, [40], handmade_plan, random_sequences)
    weights = 40 * (2 * (32 * (2 * 32 + 2 * 16) + 3 * 32 * 48) + 32 * 97)
    adapters = 40 * 2 * 4 * (64 + 48 + 48 + 64 + 3 * 80)
    adapted = flops(add_lora(model, rank=4, alpha=8), [40], handmade_plan, random_sequences)
    assert adapted == whole - 2 * weights + 6 * adapters


_ATTENTION = 2 * 32 * 32 + 2 * 32 * 16
_LATENTS = 32 * 16 + 16 * 4 * 12 + 32 * (16 + 4) + 16 * 4 * (8 + 6) + 4 * 6 * 32


@pytest.mark.parametrize(
    ("kind", "changes", "weights", "widths"),
    [
        pytest.param(
            "mixtral",
            {"num_local_experts": 4, "num_experts_per_tok": 2},
            2 * (_ATTENTION + 4 * 32 + 2 * 3 * 32 * 48),
            {None: 2 * 4 * (8 + 8)},
            id="mixtral",
        ),
        pytest.param(
            "deepseek_v3",
            {
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 4,
                "head_dim": 4,
                "v_head_dim": 6,
                "num_key_value_heads": 4,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "n_shared_experts": 1,
            },
            2 * _LATENTS + 3 * 32 * 48 + (2 + 1) * 3 * 32 * 16 + 8 * 32,
            {None: 2 * 4 * (12 + 6)},
            id="latents with keys wider than values, a dense layer and one with a shared expert",
        ),
        pytest.param(
            "gpt_oss",
            {
                "num_local_experts": 3,
                "num_experts_per_tok": 2,
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            2 * (_ATTENTION + 3 * 32 + 2 * 3 * 32 * 48),
            {7: 4 * (8 + 8), None: 4 * (8 + 8)},
            id="a window in every other layer, biases of experts",
        ),
        pytest.param(
            "ernie4_5_moe",
            {
                "moe_num_experts": 4,
                "moe_k": 2,
                "moe_intermediate_size": 16,
                "moe_num_shared_experts": 0,
                "moe_layer_start_index": 0,
                "moe_layer_end_index": 1,
                "use_bias": False,
            },
            2 * (_ATTENTION + 4 * 32 + 2 * 3 * 32 * 16),
            {None: 2 * 4 * (8 + 8)},
            id="names of Ernie",
        ),
        pytest.param(
            "jetmoe",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8, "num_attention_heads": 4},
            # Queries and outputs are made by experts too; keys and values by all.
            2 * (2 * 32 * 16 + 2 * 2 * 32 * 16 + 2 * 4 * 32 + 2 * 3 * 32 * 48),
            {None: 2 * 4 * (8 + 8)},
            id="experts of attention",
        ),
        pytest.param(
            "gpt2",
            {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 48},
            2 * (4 * 32 * 32 + 2 * 32 * 48),
            {None: 2 * 4 * (8 + 8)},
            id="embeddings of positions, a tied head",
        ),
    ],
)
def test_flops_are_those_counted_by_hand(tiny_config, handmade_plan, random_sequences, kind, changes, weights, widths):
    model = new_model(AutoConfig.for_model(**tiny_config(kind, **changes)), torch.float32, 0)
    assert flops(model, [23, 9], handmade_plan, random_sequences) == pytest.approx(
        6 * ((weights + 32 * 97) * 32 + sum(width * pairs(window, [23, 9]) for window, width in widths.items()))
    )


def test_layers_that_keep_a_state_have_no_part_that_grows_with_the_square(tiny_config, handmade_plan, random_sequences):
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    sizes = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
    config = tiny_config("qwen3_next", num_hidden_layers=3, layer_types=kinds, num_experts=4, **sizes)
    model = new_model(AutoConfig.for_model(**config, num_experts_per_tok=2), torch.float32, 0)
    once, twice = (flops(model, [length], handmade_plan, random_sequences) for length in (16, 32))
    assert twice - 2 * once == pytest.approx(6 * 4 * (8 + 8) * (pairs(None, [32]) - 2 * pairs(None, [16])))


def flops(model, lengths, handmade_plan, random_sequences):
    plan, analysis = handmade_plan(
        random_sequences(lengths), [{0: [[(i, 0, length)] for i, length in enumerate(lengths)]}]
    )
    work = next(iter(PlanStream(*open_plan(plan, analysis), vocab_size=97, max_positions=256)))
    return FlopCounter(model).count(work.step)


def pairs(window, lengths):
    """How many keys queries see, where one sees half of itself."""
    return sum(min(place + 0.5, window or place + 1) for length in lengths for place in range(length))


def test_what_a_checkpoint_says_of_a_model_is_json_also_where_a_config_has_infinity():
    config = AutoConfig.for_model("mamba2", num_hidden_layers=1)
    assert config.time_step_limit == (0.0, float("inf"))
    said = _config_identity(SimpleNamespace(model_config=config))
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert said["model.state_size"] == config.state_size
