"""Compiled layers: the same gradients, by three graphs for all chunks; what is not compiled runs as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from transformers import AutoConfig

from chunkplan_runtime.attention.interface import prepare_attention
from chunkplan_runtime.distributed.stages import cut_stage, split_layers
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models import compiled
from chunkplan_runtime.models.compiled import CompiledLayers
from chunkplan_runtime.models.fused import fuse
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.products import SummedWeight, sum_gradients
from chunkplan_runtime.models.trained import add_lora
from chunkplan_runtime.proof.prove import random_sequences, work_of
from chunkplan_runtime.training.optimizer import TrainedWeights
from tests.runtime.execution.test_split_backward import SPLIT, TARGETS, at_the_end, check_same
from tests.runtime.test_parity import MODELS

CHUNK_SIZE = 16

#: What is not compiled, and why.
REFUSED = {
    "deepseek_v3, latents": "keys and values are made of latents",
    "nemotron_h": "its layers keep states",
    "mixtral": "data-dependent",  # in float64, as it says when a layer is first called
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Sums are made in products."""
    monkeypatch.setattr(SummedWeight, "devices", frozenset({"cpu"}))


@pytest.fixture
def graphs(monkeypatch):
    """All graphs that are compiled in a test, here to themselves: what makes code of them is slow."""
    found = []

    def kept(graph, inputs):
        found.append(graph)
        return graph

    monkeypatch.setattr(compiled, "BACKEND", {"backend": aot_autograd(fw_compiler=kept, bw_compiler=kept)})
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


@pytest.fixture
def model_of(tiny_config):
    def make(name, dtype=torch.float64, *, adapted=False, compiling=False):
        config = tiny_config(**{**MODELS, **SPLIT}[name])
        model = new_model(AutoConfig.for_model(**config), dtype, seed=1)
        fuse(model.model, "torch", model.device)  # norms of transformers are in float32
        if adapted:
            model = add_lora(model, rank=3, alpha=6.0, dropout=0.3)
            for number, (name, value) in enumerate(model.model.named_parameters()):
                if "lora_B" in name:  # they begin with zeros
                    torch.nn.init.normal_(value, std=0.2, generator=torch.Generator().manual_seed(number))
        if compiling:
            CompiledLayers(model)
        return model

    return make


def gradients_of(model, work, sums=None):
    """Of one step, of `sums` or of the weights themselves."""
    RankExecutor(model, seed=3).run(work, TARGETS)
    weights = dict(model.model.named_parameters()) if sums is None else sums
    found = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    for weight in weights.values():
        weight.grad = None
    return found


def test_all_chunks_and_layers_have_three_graphs_and_the_same_gradients(model_of, graphs, capsys):
    """Keys alone, forward, backward: whatever borders, prefixes, lengths, layers, K and steps; run again too.

    Graphs of evaluations would be counted among those that a kind of layers may have, so there are none. What looks
    into layers is named.
    """
    model, other = model_of("llama with biases, tied"), model_of("llama with biases, tied", compiling=True)
    for checkpointing in ("none", "full"):
        for each in (model, other):
            each.set_checkpointing(checkpointing)
        for k in (1, 2):
            work = work_of(random_sequences(97), k)
            assert len({chunk.num_tokens for chunk in work.chunks.values()}) == 4
            check_same(gradients_of(other, work), gradients_of(model, work))
    other.model.eval()
    gradients_of(other, work)
    other.model.train()
    gradients_of(other, work)
    assert len(graphs) == 3 and not capsys.readouterr().err
    other.set_checkpointing("keep-products")
    gradients_of(other, work)
    note = "note: layers run as they are, not compiled: checkpoints hold results of their products"
    assert capsys.readouterr().err.count(note) == 1


@pytest.mark.soak
def test_what_inductor_makes_of_them_has_the_same_gradients(model_of):
    torch._dynamo.reset()
    model, other = model_of("qwen2"), model_of("qwen2", compiling=True)
    for k in (1, 2):
        work = work_of(random_sequences(97), k)
        check_same(gradients_of(other, work), gradients_of(model, work))
    assert torch._dynamo.utils.counters["inductor"]["extern_calls"]


@pytest.mark.parametrize("name", ["llama with biases, tied", pytest.param("gpt2", marks=pytest.mark.soak)])
@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_sums_in_bfloat16_are_those_of_layers_as_they_are(model_of, graphs, name, adapted):
    """And no matrix of a linear layer has a gradient of its own. GPT-2 gives its matrices transposed: these have."""
    made = set()
    sums, models = [], []
    for compiling in (False, True):
        model = model_of(name, torch.bfloat16, adapted=adapted, compiling=compiling)
        for each, weight in model.model.named_parameters():
            if weight.requires_grad and "_proj." in each and weight.ndim == 2:
                weight.register_post_accumulate_grad_hook(
                    lambda weight, each=each: made.add(each) if weight.grad is not None else None
                )
        sums.append(TrainedWeights(model.model, master_weights=True).tensors)
        models.append(model)
    for k in (1, 2):
        expected, found = (
            gradients_of(model, work_of(random_sequences(97), k), its) for model, its in zip(models, sums, strict=True)
        )
        assert found.keys() == expected.keys() == sums[0].keys()
        check_same(found, expected, 5e-2 if adapted else 0.0)  # the gradient of an input is added up in another order
    assert bool(made) == (name == "gpt2" and not adapted) and graphs


def test_two_products_of_the_same_are_both_added(graphs):
    """A compiler computes once what is given the same twice."""
    layer, plain = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)
    layer.load_state_dict(plain.state_dict())
    total = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    sum_gradients(layer.weight, total)
    x = torch.randn(3, 4, dtype=torch.float64)
    for run in (
        torch.compile(lambda x: layer(x) + layer(x), fullgraph=True, **compiled.BACKEND),
        lambda x: plain(x) * 2,
    ):
        run(x).square().sum().backward()
    assert isinstance(layer.weight, SummedWeight) and layer.weight.grad is None and total.grad is not None
    torch.testing.assert_close(total.grad, plain.weight.grad, rtol=1e-14, atol=0)
    assert len(graphs) == 2


@pytest.mark.soak
@pytest.mark.parametrize("checkpointing", ["none", "keep-attention"])
def test_adapters_and_halves_have_the_same_gradients(model_of, graphs, checkpointing):
    """Dropout draws the same. A first layer, whose input has no gradient, has graphs of its own."""
    model, other = model_of("qwen3", adapted=True), model_of("qwen3", adapted=True, compiling=True)
    work = work_of(random_sequences(97), 2)
    for each in (model, other):
        each.set_checkpointing(checkpointing)
    for actions in (work, at_the_end(work)):
        check_same(gradients_of(other, actions), gradients_of(model, actions))
    assert len(graphs) == 5


@pytest.mark.parametrize(
    ("name", "num_kinds"),
    [
        pytest.param("gemma2, softcaps and sliding window", 2, marks=pytest.mark.soak),
        pytest.param("mixtral", 1, marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="experts are no graph")),
        pytest.param("gemma3_text", 2, marks=pytest.mark.soak),
    ],
)
def test_each_kind_of_layer_has_three_graphs(model_of, graphs, name, num_kinds):
    """Of float32, in which experts are grouped products."""
    model, other = model_of(name, torch.float32), model_of(name, torch.float32, compiling=True)
    work = work_of(random_sequences(97), 2)
    check_same(gradients_of(other, work), gradients_of(model, work), 1e-6)
    assert len(graphs) == 3 * num_kinds


def test_sinks_have_their_gradients_in_graphs(model_of, graphs):
    """Of attention alone, as this model's experts are no graph."""
    model, other = model_of("gpt_oss, sinks"), model_of("gpt_oss, sinks")
    for layer in other.own_layers.values():
        prepare_attention(layer)
        attention = layer.self_attn
        attention.forward = torch.compile(attention.forward, fullgraph=True, dynamic=True, **compiled.BACKEND)
    work = work_of(random_sequences(97), 2)
    check_same(gradients_of(other, work), gradients_of(model, work))
    assert graphs


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_not_compiled_says_so_and_goes_on(model_of, graphs, name, capsys):
    dtype = torch.float64 if name == "mixtral" else torch.float32
    model, other = model_of(name, dtype), model_of(name, dtype)
    layers = CompiledLayers(other)
    work = work_of(random_sequences(97), 2)
    check_same(
        gradients_of(other, work), gradients_of(model, work), 1e-6 if dtype == torch.float32 else 1e-12
    )  # the loss is compiled
    assert str(layers).startswith("nothing: ") and REFUSED[name] in str(layers)
    notes = capsys.readouterr().err.splitlines()
    assert [note.partition(":")[0] for note in notes] == (["note"] if name == "mixtral" else [])
    assert not graphs


def test_nothing_of_a_stage_of_several_is_compiled_not_even_its_loss(model_of):
    """It would be in a step, while links are open, and a compiler waits for the device."""
    for stage in (0, 1):
        cut = cut_stage(model_of("qwen2"), split_layers(2, 2), RankLayout(pp=2, process=stage))
        forwards = [layer.forward for layer in cut.own_layers.values()]
        assert "one of several stages" in str(CompiledLayers(cut))
        assert [layer.forward for layer in cut.own_layers.values()] == forwards and not cut.current.compiles
