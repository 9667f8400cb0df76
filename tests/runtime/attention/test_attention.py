"""The attention kernels agree with plain attention, and the function that models call refuses what it does not know."""

from __future__ import annotations

import threading
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, masking_utils

from chunkplan.errors import UsageError
from chunkplan_runtime.attention.context import ChunkContext, CurrentChunk
from chunkplan_runtime.attention.function import ChunkAttention, LayerAttention
from chunkplan_runtime.attention.interface import Mask, borders_from_plan, chunk_attention, mask_of, register_attention
from chunkplan_runtime.attention.kernel import Form
from chunkplan_runtime.attention.kernels import KERNELS, Kernels
from chunkplan_runtime.kv.host_memory import HostMemory
from chunkplan_runtime.kv.pages import PageMemory
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.layout import Span
from chunkplan_runtime.models.model import new_model
from tests.support.alive import store_bytes


def plain(query, key, value, form):
    """Attention with an explicit mask over all queries and keys."""
    groups = query.shape[-3] // key.shape[-3]
    scores = query @ key.repeat_interleave(groups, -3).transpose(-1, -2) * form.scale
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    num_queries, num_keys = scores.shape[-2:]
    distance = torch.arange(num_queries)[:, None] + num_keys - num_queries - torch.arange(num_keys)
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if form.causal:
        seen &= distance >= 0
    if form.reach is not None:
        seen &= distance <= form.reach
    if form.borders is not None:
        run = torch.bucketize(torch.arange(num_keys), torch.tensor(form.borders[1:]), right=True)
        seen &= run[:, None] == run
    scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ value.repeat_interleave(groups, -3), scores.logsumexp(-1)


FORMS = [
    (1, 1, Form(0.3, causal=True)),
    (37, 37, Form(0.3, causal=True)),
    (5, 90, Form(0.3, causal=False)),
    (13, 90, Form(0.3, causal=True)),
    (37, 37, Form(0.3, causal=False, borders=(0, 4, 5, 37))),
    (37, 37, Form(0.3, causal=True, borders=(0, 4, 5, 37))),
]
WINDOWED = [
    (37, 37, Form(0.3, causal=True, reach=0)),
    (13, 90, Form(0.3, causal=True, reach=20)),
    (13, 20, Form(0.3, causal=False, reach=14)),
    (37, 37, Form(0.3, causal=True, reach=3, borders=(0, 4, 5, 37))),
    (13, 90, Form(0.3, causal=True, softcap=1.5)),
    (13, 90, Form(0.3, causal=True, softcap=1.5, reach=5)),
]
SQUARES = [form for form in FORMS if form[0] == form[1] or not form[2].causal]
CASES = [("torch-cpu", *form) for form in SQUARES] + [("reference", *form) for form in FORMS + WINDOWED]


@pytest.mark.parametrize(("name", "num_queries", "num_keys", "form"), CASES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
def test_a_kernel_is_plain_attention(name, num_queries, num_keys, form, kv_heads, dtype, tolerance, monkeypatch):
    monkeypatch.setattr("chunkplan_runtime.attention.reference.QUERIES_AT_ONCE", 8)
    torch.manual_seed(0)
    query, grad_out = torch.randn(2, 1, 4, num_queries, 16, dtype=dtype)
    # As they lie in a page: tokens first.
    key, value = torch.randn(2, 1, num_keys, kv_heads, 16, dtype=dtype).transpose(2, 3)
    kernel = KERNELS[name]
    assert kernel.why_not(query.device, dtype, (16, 16), form) is None
    out, lse = kernel.forward(query, key, value, form)
    exact = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    expected_out, expected_lse = plain(*exact, form)
    gradients = kernel.backward(grad_out, query, key, value, out, lse, form)
    expected = torch.autograd.grad(expected_out, exact, grad_out.double())
    assert out.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    for found, wanted in zip((out, lse, *gradients), (expected_out, expected_lse, *expected), strict=True):
        assert (found - wanted).norm() <= tolerance * wanted.norm().clamp(min=1)


def attend_in_chunks(query, key, value, grad_out, cuts, page_tokens, memory, window, softcap, shorts=(), tile=None):
    """Out and gradients of one sequence run part by part; the chunk of the last part holds `shorts` as well."""
    kernel = Kernels().choose(query.device, query.dtype, (8, 8), Form(1.0, True, window, softcap))
    layer = LayerAttention(kernel, 0, 0.3, window, softcap, tile)
    return attend_with(layer, query, key, value, grad_out, cuts, page_tokens, memory, shorts)


def attend_with(layer, query, key, value, grad_out, cuts, page_tokens, memory, shorts=()):
    """The same as a layer does it."""
    length = cuts[-1]
    store = KVStore(page_tokens, memory)
    leaves, results = [tensor.clone().requires_grad_() for tensor in (query, key, value)], []
    parts = [Span(7, start, end, length=length, chunk_start=0) for start, end in pairwise((0, *cuts))]
    for part in parts:
        spans, end = [part], part.stop
        for number, short in enumerate(shorts if part is parts[-1] else ()):
            spans.append(Span(number, 0, short, length=short, chunk_start=spans[-1].chunk_stop))
            end += short
        store.start_forward(part)
        given = [leaf[None, :, part.start : end] for leaf in leaves]
        out = ChunkAttention.apply(None, ChunkContext(spans, store, Kernels()), layer, *given)
        results.append(out[0].transpose(0, 1))
    peak = store_bytes(store)
    ends = [*cuts[:-1], query.shape[1]]
    for part, end, result in reversed(list(zip(parts, ends, results, strict=True))):
        store.start_backward(part)
        result.backward(grad_out[:, part.start : end])
        store.finish_backward(part)
    assert store.is_empty
    return torch.cat([result.detach() for result in results], 1), [leaf.grad for leaf in leaves], peak


@given(data=st.data())
@settings(max_examples=60)
def test_attention_in_parts_is_attention_of_the_whole_sequence(data):
    """Whatever parts, pages, window, tiles, and what else is in the chunk; with KV on the host the same bits."""
    cuts = sorted(data.draw(st.sets(st.integers(1, 40), min_size=2, max_size=7)))
    shorts = data.draw(st.lists(st.integers(1, 9), max_size=3))
    page_tokens = data.draw(st.integers(1, 45))
    window = data.draw(st.none() | st.integers(1, 45))
    tile = data.draw(st.none() | st.integers(1, 45)) if window is None else None
    softcap = data.draw(st.none() | st.just(2.0))
    torch.manual_seed(data.draw(st.integers(0, 9)))
    borders = (0, *accumulate([cuts[-1], *shorts]))
    query, grad_out = torch.randn(2, 4, borders[-1], 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, borders[-1], 8, dtype=torch.float64)
    tiles = [cut for start, stop in pairwise(borders) for cut in range(start, stop, tile or 99)]
    form = Form(0.3, True, None if window is None else window - 1, softcap, (*tiles, borders[-1]))
    exact = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    expected, _ = plain(*exact, form)
    expected.backward(grad_out)

    used = HostMemory(query.device)
    other = (torch.randn_like(each) for each in (query, key, value, grad_out))
    attend_in_chunks(*other, cuts, page_tokens, used, window, softcap, shorts, tile)
    for unused in used.unused.values():  # so that what was there before cannot go unnoticed
        for tensor in unused:
            tensor.fill_(torch.nan)
    memories = [PageMemory(), HostMemory(query.device), used]
    runs = [
        attend_in_chunks(query, key, value, grad_out, cuts, page_tokens, memory, window, softcap, shorts, tile)
        for memory in memories
    ]
    for out, gradients, _ in runs:
        torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-13)
        for gradient, leaf in zip(gradients, exact, strict=True):
            torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-13)
    out, gradients, peak = runs[0]
    for host_out, host_gradients, host_peak in runs[1:]:
        assert torch.equal(out, host_out)
        assert all(torch.equal(one, other) for one, other in zip(gradients, host_gradients, strict=True))
        assert peak == host_peak


def test_pages_are_given_back_as_their_parts_run_backward():
    store = KVStore(page_tokens=8)
    kv, held = torch.zeros(1, 2, 4, 8), []
    parts = [Span(0, start, start + 4, length=24, chunk_start=0) for start in range(0, 24, 4)]
    for part in parts:
        store.start_forward(part)
        store.write(part, 0, (kv, kv))
    for part in reversed(parts):
        store.start_backward(part)
        held.append(store_bytes(store))
        store.finish_backward(part)
    page = 2 * 2 * 8 * 8 * 4
    assert held == [3 * page, 3 * page, 2 * page, 2 * page, page, page]
    assert store_bytes(store) == 0


def test_what_lies_on_the_device_with_kv_on_the_host_does_not_grow_with_the_sequence():
    def buffered(length):
        memory = HostMemory(torch.device("cpu"))
        query, grad_out = torch.randn(2, 4, length, 8)
        key, value = torch.randn(2, 2, length, 8)
        cuts = tuple(range(8, length + 1, 8))
        attend_in_chunks(query, key, value, grad_out, cuts, 16, memory, None, None)
        return sum(each.nbytes for buffer in memory._buffers for each in buffer.tensors + buffer.gradients)

    assert buffered(32) == buffered(128) == 2 * 2 * 16 * 2 * 8 * (4 + 4)


def test_a_kernel_is_chosen_by_what_it_can_do_and_refused_by_name():
    cpu, plain_form, windowed = torch.device("cpu"), Form(1.0, True), Form(1.0, True, reach=3)
    assert Kernels().choose(cpu, torch.float32, (64, 64), plain_form).name == "torch-cpu"
    assert Kernels().choose(cpu, torch.float32, (64, 64), windowed).name == "reference"
    assert Kernels("reference").choose(cpu, torch.float32, (64, 64), plain_form).name == "reference"
    with pytest.raises(UsageError, match="torch-cpu: it has no sliding window"):
        Kernels("torch-cpu").choose(cpu, torch.float32, (64, 64), windowed)
    with pytest.raises(UsageError, match="torch-cuda: it runs on a CUDA GPU, not on cpu"):
        Kernels("torch-cuda").choose(cpu, torch.float32, (64, 64), plain_form)
    with pytest.raises(UsageError, match="no attention kernel 'flash'") as raised:
        Kernels("flash")
    assert "flash-attn-2" in raised.value.hint


@pytest.mark.parametrize("name", ["torch-cuda", "torch-cudnn"])
@pytest.mark.parametrize("form", [Form(0.3, causal=True), Form(0.3, causal=True, borders=(0, 4, 512))])
def test_the_operators_for_a_gpu_take_what_they_are_given(name, form):
    """Shapes and arguments only, by PyTorch's own description of its operators: there may be no GPU here."""
    query, grad_out = torch.empty(2, 1, 8, 512, 64, dtype=torch.bfloat16, device="meta")
    key, value = torch.empty(2, 1, 2, 512, 64, dtype=torch.bfloat16, device="meta")
    kernel = KERNELS[name]
    out, lse = kernel.forward(query, key, value, form)
    assert out.shape == query.shape
    assert lse.shape == (1, 8, 512)
    gradients = kernel.backward(grad_out, query, key, value, out, lse, form)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


@pytest.fixture
def attend():
    class Layer(torch.nn.Module):
        layer_idx = 0
        is_causal = True

    def run(batch=1, causal=True, attention_mask=None, **asked):
        layer = Layer()
        layer.is_causal = causal
        layer.chunkplan = CurrentChunk(ChunkContext((Span(0, 0, 3, length=3, chunk_start=0),), KVStore(8), Kernels()))
        query, key = torch.randn(batch, 4, 3, 8), torch.randn(batch, 2, 3, 8)
        return chunk_attention(layer, query, key, key, attention_mask, **asked)[0]

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


def test_a_model_is_not_run_without_a_chunk(tiny_config):
    register_attention()
    model = new_model(AutoConfig.for_model(**tiny_config()), torch.float32, seed=0).model
    with pytest.raises(UsageError, match="without a chunk"):
        model(torch.zeros(1, 3, dtype=torch.int64))


def test_sinks_are_a_score_beside_those_of_the_keys(attend):
    """So large that nothing else counts, they leave nothing; so small that they do not count, all there was."""
    assert attend(s_aux=torch.full((4,), 80.0)).abs().max() < 1e-6
    torch.manual_seed(0)
    plain = attend()
    torch.manual_seed(0)
    assert torch.equal(attend(s_aux=torch.full((4,), -80.0)), plain)


def test_masks_of_transformers_are_what_their_functions_say():
    assert mask_of(mask_function=masking_utils.causal_mask_function) == Mask()
    assert mask_of(mask_function=masking_utils.sliding_window_causal_mask_function(7)) == Mask(7)
    assert mask_of(mask_function=masking_utils.bidirectional_mask_function) == Mask(causal=False)
    packed = masking_utils.and_masks(
        masking_utils.packed_sequence_mask_function(torch.zeros(1, 3)),
        masking_utils.sliding_window_causal_mask_function(5),
    )
    assert mask_of(mask_function=packed) == Mask(5)
    chunked = masking_utils.chunked_causal_mask_function(4, torch.zeros(1))
    assert mask_of(mask_function=chunked) == Mask(tile=4)
    either = masking_utils.or_masks(masking_utils.causal_mask_function, lambda *_: torch.tensor(True))
    assert mask_of(mask_function=either) == Mask(causal=False)
    nothing = masking_utils.or_masks(masking_utils.causal_mask_function, lambda *_: torch.tensor(False))
    assert mask_of(mask_function=nothing).unknown == "or_masks"


def test_borders_of_sequences_are_looked_for_again_whichever_thread_ends_first():
    """A thread begins while another runs a chunk, and ends after it; a third runs something else meanwhile."""
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    both_within, first_ended = threading.Barrier(3), threading.Event()
    found = {}

    def run(name, ends_first):
        with borders_from_plan():
            both_within.wait(timeout=60)
            found[name] = masking_utils.find_packed_sequence_indices(positions)
            assert ends_first or first_ended.wait(timeout=60)
        first_ended.set()

    threads = [threading.Thread(target=run, args=(name, name == "a")) for name in "ab"]
    for thread in threads:
        thread.start()
    both_within.wait(timeout=60)
    found["elsewhere"] = masking_utils.find_packed_sequence_indices(positions)
    for thread in threads:
        thread.join(timeout=60)
    assert found.pop("elsewhere").tolist() == [[0, 0, 0, 1, 1]] and found == {"a": None, "b": None}
    assert masking_utils.find_packed_sequence_indices(positions).tolist() == [[0, 0, 0, 1, 1]]
