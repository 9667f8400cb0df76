"""Gradients of matrices are added to their sums by the product that makes them, and are those of ordinary backwards."""

from __future__ import annotations

import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.models.products import SummedWeight, sum_gradients
from chunkplan_runtime.models.trained import add_lora
from chunkplan_runtime.proof.prove import random_sequences, work_of
from chunkplan_runtime.training.optimizer import TrainedWeights
from tests.runtime.execution.test_split_backward import SPLIT, at_the_end, check_same

TARGETS = 50

#: Ways that a step runs: its actions, and how layers are held.
WAYS = {
    "whole": (lambda work: work, "none"),
    "halves": (at_the_end, "none"),
    "run again": (lambda work: work, "keep-projections"),
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Sums are made in products."""
    monkeypatch.setattr(SummedWeight, "devices", frozenset({"cpu"}))


@pytest.fixture
def model_of(tiny_config):
    def make(name, dtype, *, adapted=False):
        model = new_model(AutoConfig.for_model(**tiny_config(**SPLIT[name])), dtype, seed=1)
        return add_lora(model, rank=3, alpha=6.0) if adapted else model

    return make


def trained(model):
    return {name: value for name, value in model.model.named_parameters() if value.requires_grad}


def run(model, way, seed=3):
    as_actions, checkpointing = WAYS[way]
    model.set_checkpointing(checkpointing)
    RankExecutor(model, seed=seed).run(as_actions(work_of(random_sequences(97), 1)), TARGETS)


def with_sums(model, made=None):
    """The sum of each weight; `made` gets the names of those that ever have a gradient of their own."""
    sums = {name: SimpleNamespace(total=None) for name in trained(model)}
    for name, weight in trained(model).items():
        if made is not None:
            weight.register_post_accumulate_grad_hook(
                lambda weight, name=name: made.add(name) if weight.grad is not None else None
            )
        sum_gradients(weight, sums[name], "total")
    return sums


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "halves") for name in SPLIT),
        *((name, "whole") for name in ("llama with biases, tied", "gpt2")),
        ("qwen3_moe", "run again"),
        *(
            pytest.param(name, "whole", marks=pytest.mark.soak)
            for name in SPLIT
            if name not in ("llama with biases, tied", "gpt2")
        ),
        pytest.param("llama with biases, tied", "run again", marks=pytest.mark.soak),
    ],
)
def test_sums_are_the_gradients_of_ordinary_backwards(model_of, name, way):
    """Tied embeddings, biases, experts in stacks, matrices that are given transposed, latents, states."""
    model, other = model_of(name, torch.float64), model_of(name, torch.float64)
    sums = with_sums(other)
    for each in (model, other):
        with evaluate_in_float64(each.model):
            run(each, way)
            run(each, way, seed=4)
    check_same(
        {name: sums[name].total for name, weight in trained(model).items() if weight.grad is not None},
        {name: weight.grad for name, weight in trained(model).items() if weight.grad is not None},
        1e-14,
    )
    assert all(weight.grad is None for weight in trained(other).values())


@pytest.mark.parametrize("name", ["llama with biases, tied", "gpt2", "qwen3_moe"])
def test_no_matrix_has_a_gradient_in_bfloat16(model_of, name):
    """Of what is left, norms and biases have no product, and experts are not matrices but stacks."""
    for way in WAYS:
        made = set()
        model = model_of(name, torch.bfloat16)
        with_sums(model, made)
        run(model, way)
        matrices = {each for each, weight in trained(model).items() if weight.ndim == 2}
        assert made == trained(model).keys() - matrices, way


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", ["llama with biases, tied", "gpt2"])
def test_on_a_cpu_master_weights_have_the_bits_of_a_second_pass(model_of, name, adapted):
    """And take as many products for it: frozen weights make none."""
    model, other = (model_of(name, torch.bfloat16, adapted=adapted) for _ in range(2))
    sums = {}

    def add(name, weight):
        assert weight.grad is not None
        sums[name] = sums[name].add_(weight.grad) if name in sums else weight.grad.float()
        weight.grad = None

    for each, weight in trained(model).items():
        weight.register_post_accumulate_grad_hook(lambda weight, each=each: add(each, weight))
    masters = TrainedWeights(other.model, master_weights=True).tensors
    num_products = []
    for each in (model, other):
        with counting_operators() as found:
            run(each, "whole")
        num_products.append(found["aten::mm"] + found["aten::addmm"])
    assert masters.keys() == sums.keys()
    for name, master in masters.items():
        assert master.grad is not None
        # Rows that are looked up are not rounded to bfloat16 before they are added.
        is_looked_up = name.endswith(("embed_tokens.weight", "wte.weight", "wpe.weight"))
        assert float((master.grad - sums[name]).norm()) <= 5e-3 * is_looked_up * float(sums[name].norm())
    assert num_products[0] == num_products[1] > 0


class counting_operators(TorchDispatchMode):  # noqa: N801
    """Within the block operators of torch are counted, by name."""

    def __enter__(self):
        super().__enter__()
        self.found = Counter[str]()
        return self.found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found[function.name().partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(6, 4), (5, 5)])
def test_a_product_is_added_as_the_weight_is_laid_out_however_it_is_given(shape):
    torch.manual_seed(0)
    weight, plain = (nn.Parameter(torch.ones(shape, dtype=torch.float64)) for _ in range(2))
    total = SimpleNamespace(total=None)
    sum_gradients(weight, total, "total")
    x, y = torch.randn(2, 3, shape[1], dtype=torch.float64), torch.randn(7, shape[0], dtype=torch.float64)
    bias = torch.zeros(shape[1], dtype=torch.float64)
    for each in (weight, plain):
        for _ in range(2):
            outs = [nn.functional.linear(x, each), torch.addmm(bias, y, each), x @ each.mT, y @ each, each.sum()]
            sum(((out + 1) ** 2).sum() for out in outs).backward()
    assert weight.grad is None and plain.grad is not None
    torch.testing.assert_close(total.total, plain.grad, rtol=1e-14, atol=0)


def test_on_a_cpu_the_gradient_of_a_matrix_is_made_by_torch_itself(monkeypatch):
    monkeypatch.undo()
    layer = nn.Linear(3, 3, dtype=torch.bfloat16)
    master = TrainedWeights(layer, master_weights=True).tensors["weight"]
    out = layer(torch.ones(2, 3, dtype=torch.bfloat16))
    assert "Addmm" in type(out.grad_fn).__name__
    out.sum().backward()
    assert layer.weight.grad is None and torch.equal(master.grad, torch.full((3, 3), 2.0))


def test_a_copy_of_a_trained_weight_has_gradients_of_its_own():
    layer = nn.Linear(3, 3, dtype=torch.bfloat16)
    masters = TrainedWeights(layer, master_weights=True).tensors
    own = copy.deepcopy(layer)
    own(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    assert own.weight.grad is not None and masters["weight"].grad is None


def test_a_compiled_layer_is_one_graph_and_adds_to_the_same_sum():
    layer = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    [master] = TrainedWeights(layer, master_weights=True).tensors.values()
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(layer, backend="eager", fullgraph=True)(x).sum().backward()
    compiled, master.grad = master.grad, None
    layer(x).sum().backward()
    assert isinstance(layer.weight, SummedWeight) and layer.weight.grad is None
    torch.testing.assert_close(compiled, master.grad)


@pytest.mark.parametrize("padding", [None, 2, -2])
def test_rows_that_are_looked_up_are_added_to_the_sum(padding):
    """The same row twice in a chunk, and no gradient of padding."""
    torch.manual_seed(0)
    own, plain = (nn.Embedding(5, 3, padding, dtype=torch.float64) for _ in range(2))
    plain.load_state_dict(own.state_dict())
    total = SimpleNamespace(total=None)
    sum_gradients(own.weight, total, "total")
    made = []
    own.weight.register_post_accumulate_grad_hook(lambda weight: made.append(weight.grad))
    for ids in (torch.tensor([[1, 2, 1, 3]]), torch.tensor([[1, 4], [0, 1]])):
        for each in (own, plain):
            (each(ids) ** 3).sum().backward()
    assert made == [None] * 2 and plain.weight.grad is not None
    torch.testing.assert_close(total.total, plain.weight.grad, rtol=1e-14, atol=0)
