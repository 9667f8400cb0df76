"""A page holds tensors of any number and any widths, on the device, on the host and shared by processes."""

from __future__ import annotations

import pytest
import torch

from chunkplan_runtime.attention.kernel import Form
from tests.runtime.attention.test_attention import plain
from tests.support.kv_cases import attend_together, read_and_add

#: (heads, dim) of what is kept of a token: of keys, a latent that all heads have in common, and something odd.
SHAPES = [(4, 8), (1, 20), (2, 3)]
PARTS = [(0, 9), (9, 20), (20, 24), (24, 47)]


def tensors_of(shapes, tokens=47):
    torch.manual_seed(0)
    return [torch.randn(heads, tokens, dim, dtype=torch.float64) for heads, dim in shapes]


def weights_of(processes):
    """What is added to a token's gradients, in what it holds itself: by its own part and all later ones."""
    by_part = [sum(range(part + 1, len(PARTS) + 1)) for part in range(len(PARTS))]
    lengths = torch.tensor([stop - start for start, stop in PARTS])
    return torch.tensor(by_part).repeat_interleave(lengths) * sum(rank + 1 for rank in processes)


@pytest.mark.parametrize("page_tokens", [1, 12, 100])
@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_tensors_of_any_widths_are_kept_with_their_gradients(on_host, page_tokens):
    tensors = tensors_of(SHAPES)
    read, gradients = read_and_add(
        0, tensors=tensors, parts=PARTS, page_tokens=page_tokens, on_host=on_host, shared=False
    )
    for tensor, found, gradient in zip(tensors, read, gradients, strict=True):
        assert torch.equal(found, tensor)
        torch.testing.assert_close(gradient, weights_of(range(1))[:, None] * tensor, rtol=1e-14, atol=0)


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_tensors_of_any_widths_are_shared_with_their_gradients(pool, on_host):
    """Three processes keep a third of each part; of one with four tokens they keep one, one and two."""
    tensors = tensors_of(SHAPES)
    found = pool.run(3, read_and_add, tensors=tensors, parts=PARTS, page_tokens=12, on_host=on_host, shared=True)
    for rank, (read, gradients) in enumerate(found):
        kept = [
            token
            for start, stop in PARTS
            for token in range(start + (stop - start) * rank // 3, start + (stop - start) * (rank + 1) // 3)
        ]
        for tensor, other, gradient in zip(tensors, read, gradients, strict=True):
            assert torch.equal(other, tensor)
            expected = weights_of(range(3))[kept][:, None] * tensor[:, kept]
            torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("by_heads", [True, False], ids=["heads", "pages"])
def test_values_of_another_width_than_keys_are_attended_to_by_processes_together(pool, by_heads):
    query, key, value, grad_out = tensors_of([(4, 8), (2, 8), (2, 5), (4, 5)])
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    expected, _ = plain(*leaves, Form(0.3, causal=True))
    expected.backward(grad_out)
    found = pool.run(2, attend_together, tensors=[query, key, value], grad_out=grad_out, parts=PARTS, by_heads=by_heads)
    torch.testing.assert_close(sum(out for out, _ in found), expected.detach(), rtol=1e-12, atol=1e-13)
    for gradients, leaf in zip(zip(*(each for _, each in found), strict=True), leaves, strict=True):
        torch.testing.assert_close(sum(gradients), leaf.grad, rtol=1e-12, atol=1e-13)
