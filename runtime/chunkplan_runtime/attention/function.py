"""Attention over one chunk, exact whatever the chunk holds: whole sequences, a part of a split one, or both.

Whole sequences attend to themselves, all that lie side by side in one call. A part attends to the pages of its
sequence in the `StateStore`, its own among them; the results are merged by their LSE. Autograd saves what belongs to
the chunk and never the prefix, so that a chunk in flight costs the same memory wherever it lies in its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from chunkplan_runtime.attention.context import ChunkContext, TokenRange
from chunkplan_runtime.attention.form import Form, merge
from chunkplan_runtime.attention.kernel import AttentionKernel
from chunkplan_runtime.dtypes import wide
from chunkplan_runtime.kv.pages import Asked, KVBlock
from chunkplan_runtime.sharing import Run


@dataclass(frozen=True)
class LayerAttention:
    """Attention as one layer of a model does it.

    `window`: how many tokens a token sees, itself included. `tile`: it sees those before it in its own tile, of which a
    sequence has one every so many tokens (Llama 4).
    """

    kernel: AttentionKernel
    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    tile: int | None = None

    def form(self, causal: bool, borders: tuple[int, ...] | None = None) -> Form:
        """What is asked of the kernel where queries and keys end at the same token."""
        reach = None if self.window is None else self.window - 1
        if borders is not None and self.tile is not None:
            cut = [first for start, stop in pairwise(borders) for first in range(start, stop, self.tile)]
            borders = (*cut, borders[-1])
        return Form(self.scale, causal, reach=reach, softcap=self.softcap, borders=borders)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Tokens [start, stop) of a sequence, cut at the borders of tiles."""
        while self.tile is not None and start // self.tile < (stop - 1) // self.tile:
            border = (start // self.tile + 1) * self.tile
            yield start, border
            start = border
        yield start, stop


class ChunkAttention(torch.autograd.Function):
    """`ChunkAttention.apply(query, key, value, sink, context, attention)` -> out [heads, num_tokens, head_dim].

    query is [heads, num_tokens, head_dim]; key and value are [kv_heads, num_tokens, head_dim]. `sink` [heads], if there
    is one, is a score that every query of a head has beside those of the keys, and whose value is zero: with it in the
    LSE, the backward of the keys is as always, and its own gradient is what is left for it of the row's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        context: ChunkContext,
        attention: LayerAttention,
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
                context.store.write(tokens.part, attention.layer, (keys, values))
                out[:, here], lse[:, here] = _attend(queries, keys, values, tokens, context, attention)
        if sink is not None:
            without, lse = lse, torch.logaddexp(lse, sink[:, None].to(lse.dtype))
            out *= (without - lse).exp()[..., None].to(out.dtype)
        ctx.save_for_backward(query, key, value, sink, out, lse)
        ctx.context, ctx.attention = context, attention
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Add to the gradients of the prefix; hand out the part's own, which later parts have already completed."""
        (grad_out,) = gradients
        query, key, value, sink, out, lse = ctx.saved_tensors
        context, attention = ctx.context, ctx.attention
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for tokens in context.ranges:
            here = slice(tokens.start, tokens.stop)
            given = [tensor[:, here] for tensor in (grad_out, query, key, value, out, lse)]
            if tokens.part is None:
                results = attention.kernel.backward(*given, attention.form(context.causal, tokens.borders))
            else:
                results = _attend_backward(tokens, context, attention, *given)
            for gradient, result in zip((grad_query, grad_key, grad_value), results, strict=True):
                gradient[:, here] = result
        grad_sink = None
        if sink is not None:
            given_to_rows = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [heads, num_tokens]
            grad_sink = -((sink[:, None].to(lse.dtype) - lse).exp() * given_to_rows).sum(-1).to(sink.dtype)
        return grad_query, grad_key, grad_value, grad_sink, None, None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, tokens: TokenRange, context: ChunkContext, attention: LayerAttention
) -> tuple[Tensor, Tensor]:
    """out [heads, num_queries, value_dim] and lse [heads, num_queries] of a part over its own page and all before."""
    part = tokens.part
    assert part is not None
    out = query.new_empty(*query.shape[:2], value.shape[2], dtype=wide(query.dtype))
    lse = query.new_empty(query.shape[:2], dtype=wide(query.dtype))
    seen = 0  # queries have seen a block; the first one has the part's own tokens, of which each sees some
    blocks = context.store.blocks(
        part, attention.layer, part.first_seen(attention.window, attention.tile), Asked((key, value))
    )
    for block in blocks:
        block_key, block_value = block.tensors
        for queries, keys, form in _visible(block, tokens.runs, attention):
            found = attention.kernel.forward(query[:, queries], block_key[:, keys], block_value[:, keys], form)
            if queries.stop > seen:
                seen = queries.stop
            else:
                found = merge(out[:, queries], lse[:, queries], *found)
            out[:, queries], lse[:, queries] = found
        del block, block_key, block_value  # before there is another one
    return out, lse


def _attend_backward(
    tokens: TokenRange,
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
    part, asked = tokens.part, Asked((key, value), with_gradients=True)
    assert part is not None
    grad_query = torch.zeros_like(query, dtype=lse.dtype)  # [heads, num_queries, head_dim]
    first_seen = part.first_seen(attention.window, attention.tile)
    for block in context.store.blocks(part, attention.layer, first_seen, asked):
        block_key, block_value = block.tensors
        for queries, keys, form in _visible(block, tokens.runs, attention):
            grad_rows, query_rows, out_rows, lse_rows = (tensor[:, queries] for tensor in (grad_out, query, out, lse))
            add_query, *added = attention.kernel.backward(
                grad_rows, query_rows, block_key[:, keys], block_value[:, keys], out_rows, lse_rows, form
            )
            grad_query[:, queries] += add_query
            _add(block.gradients, keys, added)
        del block, block_key, block_value  # before there is another one
    grad_key, grad_value = asked.gradients
    return grad_query, grad_key, grad_value


def _add(gradients: Sequence[Tensor], keys: slice, added: Sequence[Tensor]) -> None:
    """Add to the gradients of some keys of a block."""
    for gradient, add in zip(gradients, added, strict=True):
        gradient[:, keys].add_(add)


def _visible(block: KVBlock, runs: tuple[Run, ...], attention: LayerAttention) -> Iterator[tuple[slice, slice, Form]]:
    """Queries that see any of a block, the keys of it that they see, and how; all that are in no other triple.

    Queries are tokens of the sequence in `runs`, [start, stop) each. A block may begin and end within a run.
    """
    offset = 0
    for start, stop in runs:
        offset -= start  # the token t of the run is query t + offset
        for first, last in attention.pieces(start, stop):
            for queries, keys, form in _visible_to_piece(block, first, last, attention):
                yield slice(queries.start + offset, queries.stop + offset), keys, form
        offset += stop


def _visible_to_piece(
    block: KVBlock, start: int, stop: int, attention: LayerAttention
) -> Iterator[tuple[slice, slice, Form]]:
    """The same of the queries [start, stop), which are given as tokens of the sequence."""
    unseen = max(0, start // attention.tile * attention.tile - block.start) if attention.tile else 0
    within = max(start, block.start), min(stop, block.stop)
    if within[0] < within[1]:
        yield slice(*within), slice(unseen, within[1] - block.start), attention.form(causal=True)
    after = max(start, block.stop)  # queries from here on see all keys, or those that a window reaches
    form = attention.form(causal=False)
    last = stop
    if attention.window is not None:
        last = min(stop, block.stop + attention.window - 1)
        # Queries end `last - block.stop` tokens after the keys of the block do, so that they reach less far in it.
        reach = attention.window - 1 - (last - block.stop)
        form = replace(form, reach=None if last - attention.window <= block.start else reach)
    if after < last and unseen < block.stop - block.start:
        yield slice(after, last), slice(unseen, block.stop - block.start), form
