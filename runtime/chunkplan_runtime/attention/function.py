"""Attention over one chunk, exact whatever the chunk holds: whole sequences, a part of a split one, or both.

Whole sequences attend to themselves, all that lie side by side in one call. A part attends to the pages of its
sequence in the `StateStore`, its own among them; the results are merged by their LSE. Autograd saves what belongs to
the chunk and never the prefix, so that a chunk in flight costs the same memory wherever it lies in its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from chunkplan_runtime.attention.context import ChunkContext
from chunkplan_runtime.attention.form import Form, merge
from chunkplan_runtime.attention.kernel import AttentionKernel
from chunkplan_runtime.dtypes import wide
from chunkplan_runtime.kv.pages import KVBlock
from chunkplan_runtime.spans import Span


@dataclass(frozen=True)
class LayerAttention:
    """Attention as one layer of a model does it. `window`: how many tokens a token sees, itself included."""

    kernel: AttentionKernel
    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    def form(self, causal: bool, borders: tuple[int, ...] | None = None) -> Form:
        """What is asked of the kernel where queries and keys end at the same token."""
        reach = None if self.window is None else self.window - 1
        return Form(self.scale, causal, reach=reach, softcap=self.softcap, borders=borders)


class ChunkAttention(torch.autograd.Function):
    """`ChunkAttention.apply(query, key, value, context, attention)` -> out [heads, num_tokens, head_dim].

    query is [heads, num_tokens, head_dim]; key and value are [kv_heads, num_tokens, head_dim].
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, context: ChunkContext, attention: LayerAttention
    ) -> Tensor:
        """Write the KV of a split sequence to the store and attend."""
        heads, num_tokens, _ = query.shape
        # Tokens first in memory: the layout that the model goes on with.
        out = query.new_empty(num_tokens, heads, value.shape[2]).transpose(0, 1)  # [heads, num_tokens, head_dim]
        lse = query.new_empty(heads, num_tokens, dtype=wide(query.dtype))  # [heads, num_tokens]
        for tokens in context.ranges:
            here = slice(tokens.start, tokens.stop)
            queries, keys, values = query[:, here], key[:, here], value[:, here]
            if tokens.part is None:
                form = attention.form(context.causal, tokens.borders)
                out[:, here], lse[:, here] = attention.kernel.forward(queries, keys, values, form)
            else:
                context.store.write(tokens.part, attention.layer, keys, values)
                out[:, here], lse[:, here] = _attend(queries, keys, values, tokens.part, context, attention)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.context, ctx.attention = context, attention
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Add to the gradients of the prefix; hand out the part's own, which later parts have already completed."""
        (grad_out,) = gradients
        query, key, value, out, lse = ctx.saved_tensors
        context, attention = ctx.context, ctx.attention
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for tokens in context.ranges:
            here = slice(tokens.start, tokens.stop)
            given = [tensor[:, here] for tensor in (grad_out, query, key, value, out, lse)]
            if tokens.part is None:
                results = attention.kernel.backward(*given, attention.form(context.causal, tokens.borders))
            else:
                results = _attend_backward(tokens.part, context, attention, *given)
            for gradient, result in zip((grad_query, grad_key, grad_value), results, strict=True):
                gradient[:, here] = result
        return grad_query, grad_key, grad_value, None, None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, part: Span, context: ChunkContext, attention: LayerAttention
) -> tuple[Tensor, Tensor]:
    """out [heads, num_queries, head_dim] and lse [heads, num_queries] of a part over its own page and all before."""
    out, lse = query, query  # replaced by the first block, which every query sees
    blocks = context.store.blocks(part, attention.layer, key, value, part.first_seen(attention.window))
    for block, queries, form in _visible(blocks, part, attention):
        block_out, block_lse = attention.kernel.forward(query[:, queries], block.key, block.value, form)
        if block.stop == part.stop:
            out, lse = block_out, block_lse
        elif queries.stop == query.shape[1]:
            out, lse = merge(out, lse, block_out, block_lse)
        else:
            merged, total = merge(out[:, queries], lse[:, queries], block_out, block_lse)
            out = torch.cat((merged, out[:, queries.stop :].to(merged.dtype)), 1)  # [heads, num_queries, head_dim]
            lse = torch.cat((total, lse[:, queries.stop :]), 1)  # [heads, num_queries]
    return out, lse


def _attend_backward(
    part: Span,
    context: ChunkContext,
    attention: LayerAttention,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a part's queries, and of its keys and values from all parts of the sequence."""
    grad_query = torch.zeros_like(query, dtype=lse.dtype)  # [heads, num_queries, head_dim]
    grad_key, grad_value = key, value  # replaced by the part's own block
    start = part.first_seen(attention.window)
    blocks = context.store.blocks(part, attention.layer, key, value, start, with_gradients=True)
    for block, queries, form in _visible(blocks, part, attention):
        grad_rows, query_rows, out_rows, lse_rows = (tensor[:, queries] for tensor in (grad_out, query, out, lse))
        add_query, add_key, add_value = attention.kernel.backward(
            grad_rows, query_rows, block.key, block.value, out_rows, lse_rows, form
        )
        grad_query[:, queries] += add_query
        assert block.grad_key is not None and block.grad_value is not None
        block.grad_key.add_(add_key)
        block.grad_value.add_(add_value)
        if block.stop == part.stop:
            own = slice(part.start - block.start, None)
            # Copies: the next block may lie where this one did.
            grad_key = block.grad_key[:, own].to(key.dtype, copy=True)
            grad_value = block.grad_value[:, own].to(value.dtype, copy=True)
    return grad_query, grad_key, grad_value


def _visible(blocks: Iterator[KVBlock], part: Span, attention: LayerAttention) -> Iterator[tuple[KVBlock, slice, Form]]:
    """Every block with the queries of the part that see any of it, and how."""
    for block in blocks:
        if block.stop == part.stop:
            yield block, slice(0, part.stop - part.start), attention.form(causal=True)
            continue
        form = attention.form(causal=False)
        stop = part.stop
        if attention.window is not None:
            stop = min(stop, block.stop + attention.window - 1)
            # Queries end `stop - block.stop` tokens after the keys of the block do, so that they reach less far in it.
            reach = attention.window - 1 - (stop - block.stop)
            form = replace(form, reach=None if stop - attention.window <= block.start else reach)
        yield block, slice(0, stop - part.start), form
