"""Attention over one chunk, exact whatever the chunk holds: whole sequences, a part of a split one, or both.

Whole sequences attend to themselves, all that lie side by side in one call. A part attends to the pages of its
sequence in the `KVStore`, its own among them; the results are merged by their LSE. So does a part of a tree, and a
whole tree to its own keys and values, as to one page. Autograd saves what belongs to
the chunk and never the prefix, so that a chunk in flight costs the same memory wherever it lies in its sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunkplan_runtime.attention.context import Attend, ChunkContext, KeptResults, TokenRange
from chunkplan_runtime.attention.kernel import AttentionKernel, Form, merge
from chunkplan_runtime.attention.latents import Expand
from chunkplan_runtime.devices import wide
from chunkplan_runtime.kv.pages import KVBlock, KVRequest, rows, zeros_wide
from chunkplan_runtime.layout import Run


class LayerAttention(NamedTuple):
    """Attention of one layer of a model.

    `window`: number of tokens that a token sees, itself included. `tile`: it sees the tokens before it in its own tile
    of this many tokens (Llama 4). `layer`: index of the layer whose pages it attends to. If it `borrows` them, their
    own layer writes them, and returns the gradients of a part's own tokens. `expand`: makes keys and values of latents
    in pages. `kept`: keeps its results, or has them.
    """

    kernel: AttentionKernel
    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    tile: int | None = None
    borrows: bool = False
    expand: Expand | None = None
    kept: tuple[KeptResults, ...] = ()

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Weights that make keys and values."""
        return () if self.expand is None else self.expand.weights

    def form(self, causal: bool, borders: tuple[int, ...] | None = None) -> Form:
        """The kernel's form where queries and keys end at the same token."""
        reach = None if self.window is None else self.window - 1
        if borders is not None and self.tile is not None:
            cut = [first for start, stop in pairwise(borders) for first in range(start, stop, self.tile)]
            borders = (*cut, borders[-1])
        return Form(self.scale, causal, reach=reach, softcap=self.softcap, borders=borders)

    def queries(self, runs: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
        """Tokens [start, stop) of a sequence, cut at the borders of tiles; and what makes the query of such a token."""
        offset = 0
        for start, stop in runs:
            offset -= start  # the token t of the run is query t + offset
            tile = self.tile or stop
            for first in (start, *range((start // tile + 1) * tile, stop, tile)):
                yield first, min((first // tile + 1) * tile, stop), offset
            offset += stop


def attend(
    context: ChunkContext, attention: LayerAttention, sink: Tensor | None, given: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Out [1, num_tokens, heads, value_dim] and lse [1, heads, num_tokens] of a chunk, new ones or what was kept."""
    do: Attend = partial(_attend_to_ranges, context, attention)
    for kept in attention.kept:
        do = partial(kept.attend, do)
    return do(sink, given)


class ChunkAttention(torch.autograd.Function):
    """`ChunkAttention.apply(sink, context, attention, query, key, value, *latents, *weights)`.

    Gives out [1, num_tokens, heads, value_dim], as models go on with it. query is [1, heads, num_tokens, head_dim]; key
    and value are [1, kv_heads, num_tokens, dim]. `sink` [heads], if there is one, is a score that every query of a head
    has beside those of the keys, and whose value is zero: with it in the LSE, the backward of the keys is as always,
    and its own gradient is what is left for it of the row's. Where attention expands latents
    [1, heads, num_tokens, dim], these get the gradients of parts of split sequences, and the `weights` of `Expand` with
    them; key and value get those of whole sequences.
    """

    @staticmethod
    def forward(
        ctx: Any, sink: Tensor | None, context: ChunkContext, attention: LayerAttention, *tensors: Tensor
    ) -> Tensor:
        """Write what is kept of a split sequence to the store and attend."""
        query, key, value, *latents = tensors[: len(tensors) - len(attention.weights)]
        out, lse = attend(context, attention, sink, (query, key, value, *latents))
        # Of latents keys and values are made again: those of a chunk in flight are needed for whole sequences only.
        is_used = not latents or any(tokens.part is None for tokens in context.ranges)
        pair = (key, value) if is_used else (None, None)
        ctx.save_for_backward(sink, out.transpose(1, 2), lse, query, *pair, *latents)
        ctx.context, ctx.attention = context, attention
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Add to the gradients of the prefix; hand out the part's own, which later parts have already completed."""
        sink, out, lse, *given = ctx.saved_tensors
        context, attention, grad_out = ctx.context, ctx.attention, gradients[0].transpose(1, 2)
        found: list[Tensor | None] = [None] * len(given)
        of_weights: list[Tensor | None] = [None] * len(attention.weights)
        of_kept = (1, 2) if len(given) == 3 else tuple(range(3, len(given)))  # which of them pages keep
        for tokens in context.ranges:
            here = slice(tokens.start, tokens.stop)
            of_queries = rows((grad_out, given[0], out, lse), here)
            places: tuple[int, ...] = (0, 1, 2)
            if tokens.part is None and tokens.tree is None:
                pair, form = rows((given[1], given[2]), here), attention.form(context.causal, tokens.borders)
                of_range = attention.kernel.backward(*of_queries[:2], *pair, *of_queries[2:], form)
            elif tokens.part is None:
                pair = rows((given[1], given[2]), here)
                block = KVBlock(0, pair[0].size(2), pair, tuple(map(zeros_wide, pair)))
                whole = attention._replace(expand=None)
                of_range = _attend_backward(tokens, iter([block]), whole, of_weights, of_queries), *block.gradients
            else:
                own = rows(tuple(given[place] for place in of_kept), here)
                request = KVRequest(own, with_gradients=True, takes_own=not attention.borrows)
                first_seen = tokens.part.first_seen(attention.window, attention.tile)
                blocks = context.store.blocks(tokens.part, attention.layer, first_seen, request)
                grad_query = _attend_backward(tokens, blocks, attention, of_weights, of_queries)
                of_range = grad_query, *request.gradients
                places = (0, *of_kept) if request.gradients else (0,)
            for place, gradient in zip(places, of_range, strict=True):
                found[place] = _put(gradient, here, given[place], found[place])
        grad_sink = None
        if sink is not None:
            given_to_rows = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [1, heads, num_tokens]
            grad_sink = -((sink[:, None].to(lse.dtype) - lse).exp() * given_to_rows).sum((0, 2)).to(sink.dtype)
        return grad_sink, None, None, *found, *of_weights


#: `ChunkAttention.apply`, without what torch does first for transforms of functions: it looks at every argument.
attention_of: Callable[..., Tensor] = super(torch.autograd.Function, ChunkAttention).apply


def _put(gradient: Tensor, here: slice, tensor: Tensor, home: Tensor | None) -> Tensor:
    """The gradient of a tensor, in `home` if there is one already: of its tokens `here` that which was found."""
    if gradient.size(2) == tensor.size(2):
        return gradient if gradient.dtype == tensor.dtype else gradient.to(tensor.dtype)
    if home is None:
        home = torch.zeros_like(tensor)
    home[:, :, here] = gradient
    return home


def _attend_to_ranges(
    context: ChunkContext, attention: LayerAttention, sink: Tensor | None, given: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Implements `attend`. In memory, tokens of out are first too: some models take views."""
    if len(context.ranges) == 1:
        out, lse = _attend_to_range(context.ranges[0], context, attention, given)
        out = out.transpose(1, 2).contiguous()
    else:
        query, value = given[0], given[2]
        out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        lse = query.new_empty(query.shape[:3], dtype=wide(query.dtype))
        for tokens in context.ranges:
            here = slice(tokens.start, tokens.stop)
            found, lse[:, :, here] = _attend_to_range(tokens, context, attention, given)
            out[:, here] = found.transpose(1, 2)
    if sink is not None:
        without, lse = lse, torch.logaddexp(lse, sink[:, None].to(lse.dtype))
        out *= (without - lse).exp().transpose(1, 2)[..., None].to(out.dtype)
    return out, lse


def _attend_to_range(
    tokens: TokenRange, context: ChunkContext, attention: LayerAttention, given: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """out [1, heads, num_queries, value_dim] and lse [1, heads, num_queries] of a range of the chunk's tokens."""
    query, key, value, *latents = rows(tuple(given), slice(tokens.start, tokens.stop))
    part, expand, blocks = tokens.part, attention.expand, iter([KVBlock(0, query.size(2), (key, value))])
    if part is None and tokens.tree is None:
        return attention.kernel.forward(query, key, value, attention.form(context.causal, tokens.borders))
    if part is None:
        expand = None
    else:
        kept = tuple(latents) or (key, value)  # what pages keep of the part
        if not attention.borrows:
            context.store.write(part, attention.layer, kept, by_parts=bool(latents))
        first_seen = part.first_seen(attention.window, attention.tile)
        blocks = context.store.blocks(part, attention.layer, first_seen, KVRequest(kept))
    out = lse = query  # until there are some
    seen = 0  # queries have seen a block; the first one has the part's own tokens, of which each sees some
    for block in blocks:
        pair = block.tensors if expand is None else expand(block.tensors)
        for queries, keys, form in _visible(block, tokens, attention):
            block_key, block_value = rows(pair, keys)
            found = attention.kernel.forward(rows((query,), queries)[0], block_key, block_value, form)
            del block_key, block_value  # before there is another block
            if queries.stop - queries.start == query.size(2):
                out, lse = merge(out, lse, *found) if seen else found
            else:
                if not seen:
                    out = query.new_empty(*query.shape[:3], found[0].shape[3])
                    lse = query.new_empty(query.shape[:3], dtype=wide(query.dtype))
                out = out.to(lse.dtype)
                if queries.stop <= seen:
                    found = merge(out[:, :, queries], lse[:, :, queries], *found)
                out[:, :, queries], lse[:, :, queries] = found
            seen = max(seen, queries.stop)
        del block, pair
    return out.to(query.dtype), lse


def _attend_backward(
    tokens: TokenRange,
    blocks: Iterator[KVBlock],
    attention: LayerAttention,
    of_weights: list[Tensor | None],
    of_queries: tuple[Tensor, ...],  # the gradient of out, the queries, out and lse
) -> Tensor:
    """Gradients of the queries of a range that sees `blocks`; adds to those of what the blocks have."""
    expand, (_, query, _, lse) = attention.expand, of_queries
    grad_query: Tensor | None = None  # [1, heads, num_queries, head_dim]
    for block in blocks:
        with nullcontext(block) if expand is None else expand.expanded(block, of_weights) as pair:
            for queries, keys, form in _visible(block, tokens, attention):
                grad_rows, query_rows, out_rows, lse_rows = rows(of_queries, queries)
                key_rows, value_rows = rows(pair.tensors, keys)
                add_query, *added = attention.kernel.backward(
                    grad_rows, query_rows, key_rows, value_rows, out_rows, lse_rows, form
                )
                del key_rows, value_rows  # before there is another block
                if grad_query is None and add_query.size(2) == query.size(2):
                    grad_query = add_query.to(lse.dtype)
                else:
                    grad_query = torch.zeros_like(query, dtype=lse.dtype) if grad_query is None else grad_query
                    rows((grad_query,), queries)[0].add_(add_query)
                for gradient, add in zip(rows(pair.gradients, keys), added, strict=True):
                    gradient.add_(add)
        del block, pair
    assert grad_query is not None, "a part sees itself"
    return grad_query


def _visible(block: KVBlock, tokens: TokenRange, attention: LayerAttention) -> Iterator[tuple[slice, slice, Form]]:
    """Queries that see any of a block, the keys of it that they see, and how; all that are in no other triple.

    Queries are those of a range: tokens of the sequence in runs, or of a tree. A block may begin and end within a run.
    """
    if tokens.tree is not None:
        plain = attention.form(causal=True)
        for queries, keys, reach, borders in tokens.tree.visible(block.start, block.stop, plain.reach, attention.tile):
            yield queries, keys, plain._replace(causal=borders is not None, reach=reach, borders=borders)
        return
    for start, stop, offset in attention.queries(tokens.runs):
        unseen = max(0, start // attention.tile * attention.tile - block.start) if attention.tile else 0
        first, last = max(start, block.start), min(stop, block.stop)
        if first < last:
            own = first - block.start if attention.kernel.squares_only else unseen
            queries = slice(first + offset, last + offset)
            yield queries, slice(own, last - block.start), attention.form(causal=True)
            if unseen < own:
                yield queries, slice(unseen, own), attention.form(causal=False)
        first, last = max(start, block.stop), stop  # queries from here on see all keys, or those that a window reaches
        form = attention.form(causal=False)
        if attention.window is not None:
            last = min(stop, block.stop + attention.window - 1)
            # Queries end `last - block.stop` tokens after the keys of the block do, so that they reach less far in it.
            reach = attention.window - 1 - (last - block.stop)
            form = form._replace(reach=None if last - attention.window <= block.start else reach)
        if first < last and unseen < block.stop - block.start:
            yield slice(first + offset, last + offset), slice(unseen, block.stop - block.start), form
