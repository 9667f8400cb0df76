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
from chunkplan_runtime.kv.pages import Block
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
        out = query.new_empty(num_tokens, heads, value.shape[2]).transpose(0, 1)
        lse = query.new_empty(heads, num_tokens, dtype=wide(query.dtype))
        for run in context.runs:
            here = slice(run.first, run.last)
            asked, keys, values = query[:, here], key[:, here], value[:, here]
            if run.part is None:
                form = attention.form(context.causal, run.borders)
                out[:, here], lse[:, here] = attention.kernel.forward(asked, keys, values, form)
            else:
                context.store.write(run.part, attention.layer, keys, values)
                out[:, here], lse[:, here] = _attend(asked, keys, values, run.part, context, attention)
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
        for run in context.runs:
            here = slice(run.first, run.last)
            given = [tensor[:, here] for tensor in (grad_out, query, key, value, out, lse)]
            if run.part is None:
                results = attention.kernel.backward(*given, attention.form(context.causal, run.borders))
            else:
                results = _attend_backward(run.part, context, attention, *given)
            for gradient, result in zip((grad_query, grad_key, grad_value), results, strict=True):
                gradient[:, here] = result
        return grad_query, grad_key, grad_value, None, None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, part: Span, context: ChunkContext, attention: LayerAttention
) -> tuple[Tensor, Tensor]:
    """out and lse of a part over its own page and all before it."""
    out, lse = query, query  # replaced by the first block, which every query sees
    blocks = context.store.blocks(part, attention.layer, key, value, part.first_seen(attention.window))
    for block, queries, form in _visible(blocks, part, attention):
        block_out, block_lse = attention.kernel.forward(query[:, queries], block.key, block.value, form)
        if block.end == part.end:
            out, lse = block_out, block_lse
        elif queries.stop == query.shape[1]:
            out, lse = merge(out, lse, block_out, block_lse)
        else:
            merged, total = merge(out[:, queries], lse[:, queries], block_out, block_lse)
            out = torch.cat((merged, out[:, queries.stop :].to(merged.dtype)), 1)
            lse = torch.cat((total, lse[:, queries.stop :]), 1)
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
    grad_query = torch.zeros_like(query, dtype=lse.dtype)
    grad_key, grad_value = key, value  # replaced by the part's own block
    first = part.first_seen(attention.window)
    blocks = context.store.blocks(part, attention.layer, key, value, first, with_gradients=True)
    for block, queries, form in _visible(blocks, part, attention):
        sent, asked, result, norm = (tensor[:, queries] for tensor in (grad_out, query, out, lse))
        add_query, add_key, add_value = attention.kernel.backward(
            sent, asked, block.key, block.value, result, norm, form
        )
        grad_query[:, queries] += add_query
        assert block.grad_key is not None and block.grad_value is not None
        block.grad_key.add_(add_key)
        block.grad_value.add_(add_value)
        if block.end == part.end:
            own = slice(part.start - block.start, None)
            # Copies: the next block may lie where this one did.
            grad_key = block.grad_key[:, own].to(key.dtype, copy=True)
            grad_value = block.grad_value[:, own].to(value.dtype, copy=True)
    return grad_query, grad_key, grad_value


def _visible(blocks: Iterator[Block], part: Span, attention: LayerAttention) -> Iterator[tuple[Block, slice, Form]]:
    """Every block with the queries of the part that see any of it, and how."""
    for block in blocks:
        if block.end == part.end:
            yield block, slice(0, part.end - part.start), attention.form(causal=True)
            continue
        form = attention.form(causal=False)
        last = part.end
        if attention.window is not None:
            last = min(last, block.end + attention.window - 1)
            # Queries end `last - block.end` tokens after the keys of the block do, so that they reach less far in it.
            reach = attention.window - 1 - (last - block.end)
            form = replace(form, reach=None if last - attention.window <= block.start else reach)
        yield block, slice(0, last - part.start), form
