"""Backwards in two halves: gradients are those of whole backwards, and little is kept between both."""

from __future__ import annotations

import random
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from chunkplan.cost.activations import activation_bytes_per_token, pending_bytes_per_token
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import shape_of_config
from chunkplan.errors import DataError
from chunkplan.planfile.plan import Action
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.models import products
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.models.trained import add_lora
from chunkplan_runtime.proof.prove import random_sequences, work_of
from tests.runtime.test_parity import MODELS, few_of

TARGETS = 50


def split(actions, weights_after):
    """`actions` with their backwards in halves: that of weights so many actions after that of inputs as it says."""
    placed = []
    for at, action in enumerate(actions):
        if action.op != "backward":
            placed.append((at, action))
        else:
            placed.append((at, replace(action, op="backward_input")))
            placed.append((at + 0.5 + weights_after(len(actions) - at), replace(action, op="backward_weight")))
    return [action for _, action in sorted(placed, key=lambda each: each[0])]


def at_once(work):
    return replace(work, actions=split(work.actions, lambda _: 0))


def at_the_end(work):
    return replace(work, actions=split(work.actions, lambda left: left))


@pytest.fixture
def model_of(tiny_config):
    def make(entries, dtype=torch.float64):
        return new_model(AutoConfig.for_model(**tiny_config(**entries)), dtype, seed=1)

    return make


def gradients_of(model, work, **how):
    """Those of all that is trained, after one step."""
    with evaluate_in_float64(model.model):
        RankExecutor(model, seed=3, **how).run(work, TARGETS)
    named = model.model.named_parameters()
    gradients = {name: value.grad for name, value in named if value.grad is not None}
    model.model.zero_grad()
    return gradients


def run_input_halves(model, work):
    """Run all of a step but the weight halves."""
    actions = [action for action in at_once(work).actions if action.op != "backward_weight"]
    executor = RankExecutor(model)
    with pytest.raises(DataError, match="no backward_weight of chunk 0"):
        executor.run(replace(work, actions=actions), TARGETS)
    return executor


def check_same(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys()
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        size = float(gradient.norm())  # that of a key's bias is zero but for rounding
        assert float((found[name] - gradient).norm()) <= tolerance * (size if size > 1e-9 * largest else largest), name


RECURRENT = {
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}

#: Products with slices of stacks of matrices, latents, matrices that are given transposed, states.
SPLIT = {
    **{name: MODELS[name] for name in ("llama with biases, tied", "qwen3_moe", "deepseek_v3, latents")},
    "gpt_oss, sinks": MODELS["gpt_oss, sinks"],
    "gpt2": {"model_type": "gpt2", "n_inner": 48, "attn_pdrop": 0.0, "embd_pdrop": 0.2, "resid_pdrop": 0.2},
    **RECURRENT,
}


@pytest.mark.parametrize(
    "name", few_of([*SPLIT, *(name for name in MODELS if name not in SPLIT)], ("qwen3_moe", "gpt_oss, sinks", "gpt2"))
)
def test_halves_add_up_to_whole_backwards_wherever_those_of_weights_are(model_of, name):
    model = model_of({**MODELS, **SPLIT}[name])
    randoms = random.Random(0)
    for k in (1, 2):
        work = work_of(random_sequences(97), k)
        expected = gradients_of(model, work)
        for actions in (split(work.actions, lambda left: randoms.randrange(left)) for _ in range(2)):
            check_same(gradients_of(model, replace(work, actions=actions)), expected)


def test_weights_of_products_have_their_gradients_in_the_weight_half_and_all_others_before(model_of):
    """Those of embeddings and head, here one matrix, and of norms and biases are not worth a half."""
    model = model_of(SPLIT["llama with biases, tied"])
    run_input_halves(model, work_of(random_sequences(97), 2))
    before = {name for name, value in model.model.named_parameters() if value.grad is not None}
    after = {name for name, _ in model.model.named_parameters()} - before
    assert after == {name for name, value in model.model.named_parameters() if ".layers." in name and value.ndim == 2}


def test_a_weight_half_leaves_no_copies_of_gradients(model_of, monkeypatch):
    """What hooks of weights find is what was computed: they are read and written once."""
    model = model_of(SPLIT["llama with biases, tied"])
    backward = products._SumOfProducts.backward
    made = []
    found = []

    def summed(*given):
        gradient, _ = backward(*given)
        made.append(gradient.data_ptr())
        return gradient, None

    def take(weight):
        if weight.grad is not None:
            found.append(weight.grad.data_ptr())
            weight.grad = None

    monkeypatch.setattr(products._SumOfProducts, "backward", summed)
    for name, weight in model.model.named_parameters():
        if ".layers." in name and weight.ndim == 2:
            weight.register_post_accumulate_grad_hook(take)
    work = work_of(random_sequences(97), 2)
    RankExecutor(model).run(replace(work, actions=at_once(work).actions), TARGETS)
    assert made and found == made


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "llama with biases, tied",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("gpt_oss, sinks", "nemotron_h")),
    ],
)
def test_adapters_and_checkpoints_are_exact_in_halves(model_of, name, checkpointing):
    """Frozen weights have no half; what adapters drop out is the same in both."""
    model = add_lora(model_of(SPLIT[name]), rank=3, alpha=6.0, dropout=0.3)
    adapters = [(each, value) for each, value in model.model.named_parameters() if "lora_B" in each]
    for number, (_, value) in enumerate(adapters):  # they begin with zeros
        torch.nn.init.normal_(value, std=0.2, generator=torch.Generator().manual_seed(number))
    work = work_of(random_sequences(97), 2)
    expected = gradients_of(model, work)
    assert all("lora_" in each for each in expected)
    if checkpointing:
        model.set_checkpointing("keep-projections")
    for way in (at_once, at_the_end):
        check_same(gradients_of(model, way(work), kv_offload=way is at_the_end), expected)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.soak) for name in ("llama", "qwen3_next"))]
)
def test_a_layer_that_is_checkpointed_leaves_its_products_too(model_of, name):
    model = model_of({**MODELS, **RECURRENT}[name])
    work = work_of(random_sequences(97), 1)
    expected = gradients_of(model, work)
    model.set_checkpointing("keep-products")
    check_same(gradients_of(model, at_the_end(work)), expected)
    executor, kept = RankExecutor(model), []
    executor.run(at_once(work), TARGETS, lambda action: kept.append(num_kept(executor)) or nullcontext())
    assert max(kept) > 0


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss, sinks"])
def test_products_of_groups_have_their_halves_too(model_of, name):
    """In float32 experts are products of groups of rows, in float64 a product for each."""
    model = model_of({**MODELS[name], "hidden_size": 32, "intermediate_size": 48}, torch.float32)
    work = work_of(random_sequences(97), 2)
    expected, stacks = {}, [value for value in model.model.parameters() if value.ndim == 3]
    assert stacks
    for way in (lambda work: work, at_the_end):
        RankExecutor(model).run(way(work), TARGETS)
        found = {each: value.grad for each, value in model.model.named_parameters()}
        model.model.zero_grad()
        check_same(found, expected or found, 1e-5)
        expected = found
    run_input_halves(model, work)
    assert all(value.grad is None for value in stacks)


def num_kept(executor):
    """Bytes of what is kept between halves, each once."""
    factors = [each for kept in executor.halves.kept.values() for each in kept]
    storages = [tensor.untyped_storage() for each in factors for tensor in (each.left, each.right)]
    return sum({each._cdata: each.nbytes() for each in storages}.values())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_between_halves_nothing_is_kept_but_inputs_of_products_and_gradients_of_what_they_make(model_of, checkpointing):
    """What several products read is kept once: of hidden size h queries, keys and values, and gate and up."""
    model = model_of(MODELS["llama"])
    if checkpointing:
        model.set_checkpointing("keep-attention")
    work = at_the_end(work_of(random_sequences(97), 1))
    hidden, queries, keys, mlp = 32, 32, 16, 48
    of_token = 2 * 8 * ((2 * hidden + queries + mlp) + (queries + 2 * keys + 2 * hidden + 2 * mlp))
    executor = RankExecutor(model)
    saved = []
    waiting = set()
    at_work = []

    def look():
        assert num_kept(executor) == of_token * sum(work.chunks[each].num_tokens for each in waiting)
        assert not [chunk for chunk, ref in saved if ref() is not None and chunk in waiting]

    @contextmanager
    def around(action):
        look()
        at_work[:] = [action]
        yield
        if action.op == "backward_input":
            waiting.add(action.chunk_id)
        elif action.op == "backward_weight":
            waiting.remove(action.chunk_id)

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor
            saved.append((at_work[0].chunk_id, weakref.ref(self)))

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda each: each.tensor):
        executor.run(work, TARGETS, around)
    look()
    assert not waiting and saved


@pytest.mark.parametrize(
    ("name", "rank"), [*((name, 0) for name in SPLIT if name != "gpt2"), ("llama with biases, tied", 4)]
)
def test_the_planner_says_of_no_model_that_less_is_kept_between_halves_than_is(model_of, name, rank):
    """With adapters too, which have all that a weight half has."""
    model = model_of(SPLIT[name], torch.float32)
    cost = CostModel(shape=shape_of_config(model.config.to_dict(), "a test"), precision="fp32", lora_rank=rank)
    if rank:
        model = add_lora(model, rank=rank, alpha=8.0)
    work = work_of(random_sequences(97), 1)
    executor = run_input_halves(model, work)
    num_tokens = sum(chunk.num_tokens for chunk in work.chunks.values())
    layers = [cost.shape.kinds[kind] for kind in cost.shape.order]
    predicted = num_tokens * sum(pending_bytes_per_token(cost, layer) for layer in layers)
    assert 0.4 * predicted < num_kept(executor) <= predicted
    # Without checkpointing it takes the place of activations that are gone.
    assert all(pending_bytes_per_token(cost, each) <= activation_bytes_per_token(cost, each) for each in layers)


#: Chunk 0 is a sequence by itself.
SPLIT_ACTIONS = [("forward", 0), ("backward_input", 0), ("backward_weight", 0)]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (SPLIT_ACTIONS[::2], "backward_weight of chunk 0 after forward"),
        ([*SPLIT_ACTIONS, SPLIT_ACTIONS[2]], "backward_weight of chunk 0 after backward_weight"),
        ([*SPLIT_ACTIONS[:2], SPLIT_ACTIONS[1]], "backward_input of chunk 0 after backward_input"),
        (SPLIT_ACTIONS[:2], "no backward_weight of chunk 0"),
        ([*SPLIT_ACTIONS[:2], ("backward", 0)], "backward of chunk 0 after backward_input"),
        ([SPLIT_ACTIONS[0], ("backward", 0), SPLIT_ACTIONS[2]], "backward_weight of chunk 0 after backward"),
    ],
)
def test_halves_in_no_order_are_refused_with_their_place(model_of, actions, message):
    work = work_of(random_sequences(97), 1)
    first = replace(work, actions=[Action(*each, 0) for each in actions], chunks={0: work.chunks[0]})
    with pytest.raises(DataError, match=f"{message}\n") as raised:
        RankExecutor(model_of(MODELS["llama"])).run(first, TARGETS)
    assert raised.value.where == "step 0, rank 0"
    assert "chunkplan validate" in str(raised.value.hint)


def test_what_a_step_that_failed_has_left_between_halves_is_forgotten(model_of):
    model = model_of(MODELS["llama"])
    work = work_of(random_sequences(97), 2)
    expected = gradients_of(model, work)
    executor = RankExecutor(model, seed=3)
    done = at_the_end(work).actions[:-1]
    with pytest.raises(DataError, match="no backward_weight"):
        executor.run(replace(work, actions=done), TARGETS)
    model.model.zero_grad()
    with evaluate_in_float64(model.model):
        executor.run(at_the_end(work), TARGETS)
    check_same({name: value.grad for name, value in model.model.named_parameters()}, expected)
