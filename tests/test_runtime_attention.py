"""The attention kernels agree with plain attention, and the function that models call refuses what it does not know."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from chunkplan.errors import UsageError
from chunkplan_runtime.attention.interface import chunk_attention, register_attention
from chunkplan_runtime.attention.kernel import kernel_for
from chunkplan_runtime.models import new_model
from chunkplan_runtime.state import ChunkContext, Span, StateStore


def plain(query, key, value, scale, causal):
    groups = query.shape[0] // key.shape[0]
    scores = query @ key.repeat_interleave(groups, 0).transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return scores.softmax(-1) @ value.repeat_interleave(groups, 0), scores.logsumexp(-1)


@pytest.mark.parametrize(("num_queries", "num_keys", "causal"), [(1, 1, True), (37, 37, True), (5, 90, False)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
def test_the_kernel_is_plain_attention(num_queries, num_keys, causal, kv_heads, dtype, tolerance):
    torch.manual_seed(0)
    query, grad_out = torch.randn(2, 4, num_queries, 16, dtype=dtype)
    key, value = torch.randn(2, kv_heads, num_keys, 16, dtype=dtype)
    kernel = kernel_for(query.device)
    out, lse = kernel.forward(query, key, value, 0.3, causal)
    exact = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    expected_out, expected_lse = plain(*exact, 0.3, causal)
    gradients = kernel.backward(grad_out, query, key, value, out, lse, 0.3, causal)
    expected = torch.autograd.grad(expected_out, exact, grad_out.double())
    assert out.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    for found, wanted in zip((out, lse, *gradients), (expected_out, expected_lse, *expected), strict=True):
        assert (found - wanted).norm() <= tolerance * wanted.norm().clamp(min=1)


def test_a_device_without_a_kernel_is_refused():
    with pytest.raises(UsageError, match="'meta'") as raised:
        kernel_for(torch.device("meta"))
    assert "cpu" in raised.value.hint


@pytest.fixture
def attend():
    class Layer(torch.nn.Module):
        layer_idx = 0
        is_causal = True

    def run(batch=1, causal=True, attention_mask=None, **asked):
        layer = Layer()
        layer.is_causal = causal
        context = ChunkContext((Span(0, 0, 3, length=3, first=0),), StateStore())
        query, key = torch.randn(batch, 4, 3, 8), torch.randn(batch, 2, 3, 8)
        return chunk_attention(layer, query, key, key, attention_mask, **{"chunk_context": context, **asked})[0]

    return run


def test_arguments_that_say_nothing_are_accepted(attend):
    out = attend(
        dropout=0.0, sliding_window=None, softcap=None, is_causal=True, position_ids=torch.arange(3), use_cache=False
    )
    assert out.shape == (1, 3, 4, 8)


@pytest.mark.parametrize(
    "asked",
    [
        {"attention_mask": torch.ones(1, 1, 3, 3)},
        {"dropout": 0.1},
        {"sliding_window": 2},
        {"softcap": 30.0},
        {"s_aux": torch.zeros(4)},
        {"position_bias": torch.zeros(1)},
        {"is_causal": False},
        {"output_attentions": True},
    ],
)
def test_what_it_does_not_know_is_refused_by_name(attend, asked):
    with pytest.raises(UsageError, match=next(iter(asked))):
        attend(**asked)


def test_a_layer_that_is_not_causal_and_a_batch_are_refused(attend):
    with pytest.raises(UsageError, match="is_causal"):
        attend(causal=False)
    with pytest.raises(UsageError, match="one row, found 2"):
        attend(batch=2)


def test_a_model_is_not_run_without_a_chunk_or_with_a_mask(tiny_config):
    register_attention()
    model = new_model(AutoConfig.for_model(**tiny_config()), torch.float32, seed=0).model
    with pytest.raises(UsageError, match="without a chunk"):
        model(torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(UsageError, match="takes no mask"):
        model(torch.zeros(1, 3, dtype=torch.int64), attention_mask=torch.tensor([[0, 1, 1]]))
