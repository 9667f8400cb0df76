"""Pages keep what a layer makes keys and values of, or those of the layer that has them too; gradients stay exact."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig
from transformers.models.minicpm3.modeling_minicpm3 import MiniCPM3Attention

from chunkplan_runtime.attention.context import ChunkContext, CurrentChunk
from chunkplan_runtime.attention.interface import Mask, chunk_attention
from chunkplan_runtime.attention.kernel import Form
from chunkplan_runtime.attention.kernels import Kernels
from chunkplan_runtime.attention.latents import Expand, page_shapes, watch_expansion
from chunkplan_runtime.devices import no_device_waits
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.kv.host_memory import HostMemory
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.layout import Span
from chunkplan_runtime.models.checks import kv_shapes
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.tiny import tiny_document
from chunkplan_runtime.models.trained import add_lora
from chunkplan_runtime.parity import compare_plan
from chunkplan_runtime.proof.prove import spread_weights
from tests.runtime.attention.test_attention import plain
from tests.support.alive import store_bytes
from tests.support.mixed_chunks import LENGTHS, MIXED

#: Types with latents, and what their default configs leave out.
LATENT = {
    "deepseek_v2": {"num_experts_per_tok": 6, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v3": {},
    "glm4_moe_lite": {},
    "minicpm3": {},
}

#: Of a small model: a latent of 16 and a rotary key of 8; 2 heads with keys of 16 and values of 12.
WIDTHS, EXPANDED = (16, 8), (2 * 16, 2 * 12)

#: Five layers, of which the last two attend with keys and values of the two before.
SHARING = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}


@pytest.fixture
def model():
    def make(model_type, dtype=torch.float64):
        document = tiny_document(AutoConfig.for_model(model_type, **LATENT.get(model_type, {})).to_dict())
        if model_type == "gemma3n_text":
            document |= SHARING | {"intermediate_size": [48] * 5, "activation_sparsity_pattern": [0.0] * 5}
        made = new_model(AutoConfig.for_model(**document), torch.float64, seed=1)
        spread_weights(made.model)
        made.model.to(dtype)
        return made

    return make


@pytest.fixture
def plan(handmade_plan, random_sequences):
    """Packed, split and mixed chunks."""
    return lambda k: handmade_plan([(ids % 64, target) for ids, target in random_sequences(LENGTHS)], [{0: MIXED}], k=k)


@dataclass
class Kept:
    """By layer, how many numbers pages keep of a token: of each tensor. And in which dtypes."""

    widths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)


@pytest.fixture
def kept(monkeypatch):
    found, write = Kept(), KVStore.write

    def watched(self, span, layer, tensors, **how):
        if tensors[0].dim() == 4:  # where pages are counted they hold nothing
            found.widths[layer] = tuple(tensor.shape[1] * tensor.shape[3] for tensor in tensors)
            found.dtypes.update(tensor.dtype for tensor in tensors)
        write(self, span, layer, tensors, **how)

    monkeypatch.setattr(KVStore, "write", watched)
    return found


def work_of(plan, model):
    [work] = next(iter(PlanStream(*open_plan(*plan), vocab_size=model.vocab_size, max_positions=256))).ranks
    return work


@pytest.mark.parametrize(
    ("k", "kv_offload", "checkpointing"),
    [(1, True, True), *(pytest.param(2, on_host, False, marks=pytest.mark.soak) for on_host in (False, True))],
)
@pytest.mark.parametrize("model_type", LATENT)
def test_latents_are_kept_and_exact(model_type, k, kv_offload, checkpointing, model, plan, kept):
    run = model(model_type)
    if checkpointing:
        run.set_checkpointing("full")
    report = compare_plan(*plan(k), run, kv_offload=kv_offload)
    assert report.max_relative_error < 1e-12
    assert report.loss == pytest.approx(report.reference_loss, rel=1e-13)
    assert set(kept.widths.values()) == {WIDTHS} and len(kept.widths) == run.config.num_hidden_layers


@pytest.mark.parametrize("trained", ["all but it", "it alone"])
def test_a_projection_that_is_frozen_or_trained_alone_is_exact(trained, model, plan, kept):
    run = model("minicpm3")
    for name, weight in run.model.named_parameters():
        weight.requires_grad_(("kv_b_proj" in name) == (trained == "it alone"))
    report = compare_plan(*plan(2), run)
    assert report.max_relative_error < 1e-12
    assert any("kv_b_proj" in name for name in report.relative_errors) == (trained == "it alone")
    assert set(kept.widths.values()) == {WIDTHS}


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.soak), True])
def test_adapters_on_the_projection_are_exact(checkpointing, model, plan, kept):
    run = add_lora(model("deepseek_v3"), rank=2, alpha=4, targets=("kv_b_proj", "q_a_proj"))
    spread_weights(run.model)  # peft starts one of each two at zero
    if checkpointing:
        run.set_checkpointing("full")
    report = compare_plan(*plan(1), run)
    assert report.max_relative_error < 1e-12
    assert any("kv_b_proj.lora_A" in name for name in report.relative_errors)
    assert set(kept.widths.values()) == {WIDTHS}


def test_with_dropout_in_the_layer_nothing_is_expanded_again(model, plan, kept):
    """It would draw otherwise; so gradients are the same bits whatever K."""
    gradients = []
    for k in (1, 2):
        run = add_lora(model("minicpm3"), rank=2, alpha=4, dropout=0.3, targets=("kv_b_proj",))
        spread_weights(run.model)
        RankExecutor(run).run(work_of(plan(k), run), 10)
        gradients.append([weight.grad for weight in run.model.parameters() if weight.requires_grad])
        assert page_shapes(run.own_layers[0], kv_shapes(run.config)) == [(kv_shapes(run.config), False)]
    assert set(kept.widths.values()) == {EXPANDED}
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("how", ["in their place", "in place"])
def test_where_keys_are_not_what_was_made_of_latents_they_are_kept_themselves(how, model, plan, kept):
    class Scaled(MiniCPM3Attention):
        """Changes its keys after they were made."""

        def forward(self, *arguments, **keywords):
            made = self.expand_kv

            def then_scaled(*latents):
                key, value = made(*latents)
                return (key * 1.5 if how == "in their place" else key.mul_(1.5)), value

            self.expand_kv = then_scaled
            try:
                return super().forward(*arguments, **keywords)
            finally:
                self.expand_kv = made

    run = model("minicpm3")
    run.own_layers[1].self_attn.__class__ = Scaled
    watch_expansion(run.own_layers[1].self_attn)
    report = compare_plan(*plan(2), run)
    assert report.max_relative_error < 1e-12
    assert kept.widths == {0: WIDTHS, 1: EXPANDED}


def most_bytes(model, work):
    """The most that pages take in a step: when the last part of a sequence has run backward."""
    executor, held, finish = RankExecutor(model), [], KVStore.finish_backward

    def watched(self, span):
        held.append(store_bytes(self))
        finish(self, span)

    with patch.object(KVStore, "finish_backward", watched):
        executor.run(work, 10)
    assert executor.stores[0].is_empty
    return max(held)


def test_pages_take_the_bytes_of_latents(model, plan, monkeypatch):
    """Of 23 and of 30 tokens, not at once; in float64 gradients take as much again."""
    run = model("minicpm3")
    work = work_of(plan(1), run)
    assert most_bytes(run, work) == 30 * run.config.num_hidden_layers * sum(WIDTHS) * 8 * 2
    monkeypatch.setattr("chunkplan_runtime.attention.latents.LEAST_SAVING", 3)
    assert most_bytes(run, work) == 30 * run.config.num_hidden_layers * sum(EXPANDED) * 8 * 2


def test_no_more_than_a_part_is_expanded_at_once(model, plan, monkeypatch):
    run, expanded, expand = model("minicpm3"), [], Expand.__call__

    def watched(self, latents):
        expanded.append(latents[0].shape[2])
        return expand(self, latents)

    monkeypatch.setattr(Expand, "__call__", watched)
    RankExecutor(run).run(work_of(plan(2), run), 10)
    assert {*expanded} == {8, 3, 12, 13, 1, 16}, "the parts of two sequences"


def test_no_keys_and_values_of_a_part_stay_for_its_backward(model, plan):
    """They are made again of latents, which autograd keeps anyway: for the weights of the projection."""
    run = model("minicpm3")
    work = work_of(plan(2), run)
    saved = []
    executor = RankExecutor(run)

    def around(action):
        is_part = action.chunk_id == 4
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (is_part and saved.append(tuple(tensor.shape)), tensor)[1], lambda tensor: tensor
        )

    executor.run(work, 10, around)
    assert (1, 1, 13, 16) in saved, "latents"
    assert (1, 2, 13, 16) in saved, "queries, and outputs have heads of 12"
    assert saved.count((1, 2, 13, 16)) == run.config.num_hidden_layers


@pytest.mark.parametrize("autocast", [False, True])
def test_latents_in_bfloat16_are_close_to_float64(autocast, model, plan, kept):
    """With autocast too, where a backward runs outside of it; it is the pages that are in bfloat16 then."""
    exact, close = model("minicpm3"), model("minicpm3", torch.float32 if autocast else torch.bfloat16)
    exact.model.load_state_dict({name: value.double() for name, value in close.model.state_dict().items()})
    RankExecutor(exact).run(work_of(plan(1), exact), 10)
    if autocast:
        close.model.model.forward = torch.autocast("cpu", torch.bfloat16)(close.model.model.forward)
    kept.dtypes.clear()
    RankExecutor(close).run(work_of(plan(1), close), 10)
    assert kept.dtypes == {torch.bfloat16}
    for (name, weight), other in zip(exact.model.named_parameters(), close.model.parameters(), strict=True):
        assert (weight.grad - other.grad).norm() < 0.1 * weight.grad.norm(), name
        assert other.grad.dtype == other.dtype


class _NoWaits:
    """Links to no other stage, while which are open no memory may be taken."""

    def open(self, *_):
        return no_device_waits()


@pytest.mark.parametrize("model_type", ["deepseek_v3", "longcat_flash", "gemma3n_text"])
def test_host_memory_is_reserved_for_just_what_pages_keep(model_type, model, plan):
    """Of layers that attend twice, too."""
    run = model(model_type, torch.bfloat16)
    taken = []
    for links in (None, _NoWaits()):
        executor = RankExecutor(run, kv_offload=True, links=links)
        with nullcontext() if links else patch.object(HostMemory, "reserve"):  # so that it is taken when it is needed
            executor.run(work_of(plan(2), run), 10)
        assert isinstance(executor.memory, HostMemory)
        taken.append({key: len(tensors) for key, tensors in executor.memory.unused.items() if tensors})
    assert taken[0] == taken[1]


def shared_layers(run):
    return [index for index, layer in run.own_layers.items() if layer.self_attn.is_kv_shared_layer]


@pytest.mark.parametrize(
    ("k", "kv_offload"), [(2, True), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((1, True), (2, False)))]
)
def test_layers_that_share_keys_and_values_share_pages(k, kv_offload, model, plan, kept):
    run = model("gemma3n_text")
    assert shared_layers(run) == [3, 4]
    report = compare_plan(*plan(k), run, kv_offload=kv_offload)
    assert report.max_relative_error < 1e-12
    assert sorted(kept.widths) == [0, 1, 2]
    (heads, dim), _ = kv_shapes(run.config)
    assert most_bytes(run, work_of(plan(k), run)) == 30 * 3 * 2 * heads * dim * 8 * 2


def test_layers_that_share_pages_do_so_too_when_they_run_again(model, plan, kept):
    """A later layer runs again before the one whose keys and values it has, and takes those of the first run."""
    gradients = []
    for checkpointing in (False, True):
        run = model("gemma3n_text", torch.float32)
        if checkpointing:
            run.set_checkpointing("full")
        RankExecutor(run).run(work_of(plan(2), run), 10)
        gradients.append([weight.grad for weight in run.model.parameters() if weight.grad is not None])
    assert sorted(kept.widths) == [0, 1, 2]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


class _Latent(nn.Module):
    """A layer with latents, as transformers writes one: 2 heads, keys of 3 and 2, values of 4."""

    is_causal = True

    def __init__(self, layer, rank):
        super().__init__()
        self.layer_idx = layer
        self.kv_b_proj = nn.Linear(rank, 2 * (3 + 4), dtype=torch.float64)
        watch_expansion(self)

    def expand_kv(self, latent, rotary):
        key, value = self.kv_b_proj(latent[:, 0]).unflatten(-1, (2, 7)).transpose(1, 2).split([3, 4], -1)
        return torch.cat([key, rotary.expand(-1, 2, -1, -1)], -1), value


@given(
    rank=st.integers(1, 12),
    parts=st.lists(st.integers(1, 7), min_size=2, max_size=5),
    beside=st.integers(0, 4),
    page_tokens=st.integers(1, 12),
    window=st.none() | st.integers(1, 9),
    on_host=st.booleans(),
    sharing=st.integers(0, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_any_parts_have_the_gradients_of_the_whole_sequence(
    rank, parts, beside, page_tokens, window, on_host, sharing, seed
):
    """Of latents where that saves enough, else of keys; more layers attend with the same ones; a whole one beside."""
    torch.manual_seed(seed)
    length, attend = sum(parts), Kernels("reference")
    layers = [_Latent(layer, rank) for layer in range(1 + sharing)]
    numbers = [(1, rank), (1, 2), *[(2, 5)] * (1 + sharing), *[(2, 4)] * (1 + sharing)]

    def drawn(tokens):
        made = [torch.randn(heads, tokens, dim, dtype=torch.float64) for heads, dim in numbers]
        return [each.requires_grad_() for each in made]

    whole, other = drawn(length), drawn(beside)

    def expected(tensors):
        latent, rotary, *rest = tensors
        key, value = type(layers[0]).expand_kv(layers[0], latent[None], rotary[None])
        form = Form(0.4, causal=True, reach=None if window is None else window - 1)
        outs = [plain(query, key[0], value[0], form)[0] for query in rest[: 1 + sharing]]
        return torch.stack([(out * weight).sum() for out, weight in zip(outs, rest[1 + sharing :], strict=True)]).sum()

    inputs = [*whole[: 3 + sharing], *layers[0].parameters()]
    if beside:
        (expected(whole) + expected(other)).backward()
    else:
        expected(whole).backward()
    wanted = [each.grad for each in (*inputs, *other[: 3 + sharing])]
    for each in (*inputs, *other):
        each.grad = None

    store = KVStore(page_tokens, HostMemory(torch.device("cpu")) if on_host else None)
    done = []
    start = 0
    for part in parts:
        span = Span(7, start, start + part, length, 0)
        spans = [span] + ([Span(8, 0, beside, beside, part)] if beside and start == 0 else [])
        given_tensors = [
            torch.cat([a[:, start : start + part], b], 1)[None] if len(spans) == 2 else a[None, :, start : start + part]
            for a, b in zip(whole, other, strict=True)
        ]
        store.start_forward(span)
        current = CurrentChunk(ChunkContext(spans, store, attend))
        for layer in layers:
            layer.chunkplan = current
        latent, rotary, *rest = given_tensors
        key, value = layers[0].expand_kv(latent, rotary)
        loss = torch.zeros((), dtype=torch.float64)
        before = 0.0
        for place, layer in enumerate(layers):
            # The output of a layer goes into the next one, which so runs backward before it.
            out, _ = chunk_attention(layer, rest[place] + 0 * before, key, value, Mask(window), scaling=0.4)
            before = out.sum()
            loss = loss + (out[0].transpose(0, 1) * rest[1 + sharing + place][0]).sum()
        done.append((span, loss))
        start += part
    for span, loss in reversed(done):
        store.start_backward(span)
        loss.backward()
        store.finish_backward(span)
    assert store.is_empty
    for found, gradient in zip((*inputs, *other[: 3 + sharing]), wanted, strict=True):
        if gradient is not None:
            assert found.grad is not None
            torch.testing.assert_close(found.grad, gradient, rtol=1e-10, atol=1e-12)
