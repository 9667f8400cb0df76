"""A loss over the log-probabilities of a whole step has, chunk by chunk, the gradients that whole sequences give it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chunkplan.errors import UsageError
from chunkplan_runtime import Executor
from chunkplan_runtime.models.parts import evaluate_in_float64
from tests.support.hf_cases import assert_same_gradients, with_adapters
from tests.support.mixed_chunks import LENGTHS, MIXED
from tests.support.step_loss_cases import (
    clipped_policy,
    entropies_alone,
    gradients_of,
    log_probs_of,
    on_whole_sequences,
    preference,
    with_entropy_bonus,
)

DEALT = {0: MIXED[:3], 1: [[]], 2: MIXED[3:]}

#: Without parts of one token, which layers that keep a state cannot run.
OF_STATES = {0: [[(0, 0, 10)], [(0, 10, 23)], [(1, 0, 5), (2, 0, 9)]], 1: [[(4, 0, 30), (3, 0, 3)]], 2: [[(6, 0, 8)]]}


#: What the tiny config of a type needs beside the usual.
SIZES = {
    "gemma2": {"sliding_window": 7},
    "gemma3_text": {"sliding_window": 7},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}

LOSSES = [preference, clipped_policy, with_entropy_bonus, entropies_alone]


@pytest.fixture
def new_model(tiny_config):
    def make(model_type="llama", **changes):
        torch.manual_seed(1)
        config = AutoConfig.for_model(**tiny_config(model_type, **SIZES.get(model_type, {}), **changes))
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        made.set_experts_implementation("eager")  # that of products in groups has no float64
        return made

    return make


@pytest.fixture
def new_plan(handmade_plan, random_sequences):
    def make(steps=(DEALT,), **how):
        sequences = random_sequences(LENGTHS)
        return handmade_plan(sequences, list(steps), **{"k": 2, "dp": 3, **how})[0], sequences

    return make


@pytest.mark.parametrize(
    ("model_type", "loss", "how"),
    [
        *(("llama", loss, {}) for loss in LOSSES),
        ("qwen3_next", with_entropy_bonus, {}),
        ("gemma2", preference, {"kv_offload": True}),
        *(
            pytest.param(model_type, loss, {"checkpointing": level}, marks=pytest.mark.soak)
            for model_type in ("qwen2", "gemma3_text", "qwen3_moe")
            for loss in LOSSES
            for level in ("none", "keep-attention")
        ),
    ],
)
@pytest.mark.parametrize("k", [1, 3])
def test_a_step_has_the_loss_and_the_gradients_of_whole_sequences(model_type, loss, how, k, new_model, new_plan):
    plan, sequences = new_plan([OF_STATES if model_type == "qwen3_next" else DEALT], k=k)
    model, untouched = new_model(model_type), new_model(model_type)
    executor = Executor.from_model(model, **how)
    with evaluate_in_float64(untouched):
        value, reference = on_whole_sequences(untouched, sequences, loss)
    with evaluate_in_float64(model):
        [found] = [executor.step(work, loss) for work in executor.stream(plan)]
    assert found == pytest.approx(value, rel=1e-12)
    assert_same_gradients(gradients_of(model), reference)


def test_cross_entropy_as_such_a_loss_is_the_one_without(new_model, new_plan):
    """And dropout draws in both forwards of a chunk what it draws in the one."""
    plan, _ = new_plan()
    found = []
    for loss in (None, lambda tokens: -tokens.log_probs.mean()):
        model = new_model("gpt2", attn_pdrop=0.0, resid_pdrop=0.2).train()
        executor = Executor.from_model(model, seed=3)
        found.append(([executor.step(work, loss) for work in executor.stream(plan)], gradients_of(model)))
    (plain, of_plain), (given, of_given) = found
    assert given == pytest.approx(plain, rel=1e-12)
    assert_same_gradients(of_given, of_plain)


def test_the_reference_is_the_model_without_its_adapters(new_model, new_plan):
    plan, sequences = new_plan()
    base, model, untouched = new_model(), with_adapters(new_model()), with_adapters(new_model())
    for each in (model, untouched):
        for name, weight in each.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(5))
    reference = log_probs_of(base, sequences)[0].detach()
    value, gradients = on_whole_sequences(untouched, sequences, preference, reference)
    executor = Executor.from_model(model)
    [found] = [executor.step(work, preference, with_reference=True) for work in executor.stream(plan)]
    assert found == pytest.approx(value, rel=1e-12)
    assert_same_gradients(gradients_of(model), gradients)


def test_a_sequence_that_a_step_has_twice_is_there_twice(new_model, new_plan):
    plan, sequences = new_plan([{0: MIXED, 1: MIXED}], dp=2)
    seen = []

    def loss(tokens):
        seen.append(tokens)
        return tokens.sums(tokens.log_probs).square().sum()

    model, untouched = new_model(), new_model()
    executor = Executor.from_model(model)
    [found] = [executor.step(work, loss) for work in executor.stream(plan)]
    value, gradients = on_whole_sequences(untouched, sequences, loss)
    assert found == pytest.approx(2 * value, rel=1e-12)
    assert_same_gradients({name: each / 2 for name, each in gradients_of(model).items()}, gradients)
    twice, once = seen
    assert twice.sequence_ids.tolist() == once.sequence_ids.repeat_interleave(2).tolist()
    assert twice.positions.tolist() == [
        position
        for place in range(len(once.sequence_ids))
        for _ in range(2)
        for position in once.positions[once.which == place].tolist()
    ]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda tokens: tokens.log_probs, r"a tensor of shape \(\d+,\), expected one number"),
        (lambda tokens: tokens.log_probs.detach().sum(), r"a tensor of shape \(\) without a gradient"),
        (lambda tokens: 1.0, "the loss of the step is float"),
        (lambda tokens: tokens.logits, r"test_step_loss\.py:\d+: the loss of the step raised AttributeError: "),
    ],
)
def test_what_is_no_loss_of_log_probabilities_is_refused(loss, words, new_model, new_plan):
    """And adds no gradients."""
    plan, _ = new_plan()
    model = new_model()
    executor = Executor.from_model(model)
    with pytest.raises(UsageError, match=words):
        executor.step(next(iter(executor.stream(plan))), loss)
    assert gradients_of(model) == {}


def test_a_model_without_adapters_has_no_reference(new_model, new_plan):
    plan, _ = new_plan()
    executor = Executor.from_model(new_model())
    with pytest.raises(UsageError, match="no adapters"):
        executor.step(next(iter(executor.stream(plan))), preference, with_reference=True)
