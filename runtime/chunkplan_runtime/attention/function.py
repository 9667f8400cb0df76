"""Attention over one chunk, exact whatever the chunk holds: whole sequences, a part of a split one, or both.

A segment attends to itself (a causal square) and, when it is a part with a prefix, to every earlier block of its
sequence, whose KV is in the `StateStore`; the blocks are merged by their LSE. Autograd saves what belongs to the chunk
and never the prefix, so that a chunk in flight costs the same memory wherever it lies in its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from chunkplan_runtime.attention.kernel import kernel_for
from chunkplan_runtime.state import ChunkContext, Span

#: Tokens of the prefix per kernel call: bounds what expanding KV heads and casting gradients cost at once.
KV_BLOCK = 4096


class ChunkAttention(torch.autograd.Function):
    """`ChunkAttention.apply(query, key, value, context, layer, scale)` -> out [heads, num_tokens, head_dim].

    query is [heads, num_tokens, head_dim]; key and value are [kv_heads, num_tokens, head_dim].
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, context: ChunkContext, layer: int, scale: float
    ) -> Tensor:
        """Write the KV of a split sequence to the store and attend."""
        kernel = kernel_for(query.device)
        heads, num_tokens, head_dim = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(num_tokens, heads, head_dim).transpose(0, 1)  # the layout that the model goes on with
        lse = query.new_empty(heads, num_tokens, dtype=wide)
        for span in context.spans:
            here = slice(span.first, span.last)
            if span.is_split:
                context.store.write(span, layer, key[:, here], value[:, here])
            span_out, span_lse = kernel.forward(query[:, here], key[:, here], value[:, here], scale, True)
            for tokens in _prefix_blocks(span):
                block_key, block_value = context.store.read(span, layer, tokens)
                block_out, block_lse = kernel.forward(query[:, here], block_key, block_value, scale, False)
                span_out, span_lse = _merge(span_out.to(wide), span_lse, block_out, block_lse)
            out[:, here], lse[:, here] = span_out, span_lse
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.context, ctx.layer, ctx.scale = context, layer, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Add to the gradients of the prefix; hand out the part's own, which later parts have already completed."""
        (grad_out,) = gradients
        query, key, value, out, lse = ctx.saved_tensors
        store, layer, scale = ctx.context.store, ctx.layer, ctx.scale
        kernel = kernel_for(query.device)
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for span in ctx.context.spans:
            here = slice(span.first, span.last)
            sent, asked, result, norm = (tensor[:, here] for tensor in (grad_out, query, out, lse))
            span_query, span_key, span_value = kernel.backward(
                sent, asked, key[:, here], value[:, here], result, norm, scale, True
            )
            for tokens in _prefix_blocks(span):
                block_key, block_value = store.read(span, layer, tokens)
                block_query, add_key, add_value = kernel.backward(
                    sent, asked, block_key, block_value, result, norm, scale, False
                )
                span_query = span_query.to(lse.dtype) + block_query
                prefix_key, prefix_value = store.gradient(span, layer, tokens)
                prefix_key += add_key
                prefix_value += add_value
            if span.is_split:
                own_key, own_value = store.gradient(span, layer, slice(span.start, span.end))
                span_key, span_value = span_key + own_key, span_value + own_value
            grad_query[:, here], grad_key[:, here], grad_value[:, here] = span_query, span_key, span_value
        return grad_query, grad_key, grad_value, None, None, None


def _prefix_blocks(span: Span) -> Iterator[slice]:
    return (slice(start, min(start + KV_BLOCK, span.start)) for start in range(0, span.start, KV_BLOCK))


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, from attention over those of each."""
    total = torch.logaddexp(lse, block_lse)
    return out * (lse - total).exp()[..., None] + block_out * (block_lse - total).exp()[..., None], total
