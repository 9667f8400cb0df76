"""The plain kernel: attention as it is written down, in any dtype on any device, a block of queries at a time.

Scores are held for `QUERIES_AT_ONCE` queries and computed in at least float32. It serves what no fused kernel takes
(float64 on a GPU, softcap, sliding windows on a CPU), and is what the others are tested against.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from chunkplan_runtime.attention.kernel import AttentionKernel, Form
from chunkplan_runtime.devices import wide

#: Queries whose scores are held at once.
QUERIES_AT_ONCE = 256


class ReferenceKernel(AttentionKernel):
    """Takes everything. In it scores and the like are [1, kv_heads, heads a KV head, num_queries, num_keys]."""

    name = "reference"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """Implements `kernel.AttentionKernel.forward`."""
        out = query.new_empty(*query.shape[:3], value.shape[3])  # [1, heads, num_queries, value_dim]
        lse = query.new_empty(query.shape[:3], dtype=wide(query.dtype))  # [1, heads, num_queries]
        for queries, keys, alignment in _blocks(query.shape[2], key.shape[2], form):
            scores, _ = _scores(query[:, :, queries], key[:, :, keys], form, alignment)
            block_lse = torch.logsumexp(scores, -1)  # [1, kv_heads, heads a KV head, queries]
            weights = (scores - block_lse[..., None]).exp()
            block_out = weights @ _grouped_keys(value[:, :, keys], scores.dtype)  # [..., queries, value_dim]
            out[:, :, queries] = block_out.flatten(1, 2)
            lse[:, :, queries] = block_lse.flatten(1, 2)
        return out, lse

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Implements `kernel.AttentionKernel.backward`."""
        dtype, num_groups = wide(query.dtype), key.shape[1]
        grad_query = query.new_empty(query.shape)  # [1, heads, num_queries, head_dim]
        grad_key, grad_value = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
        for queries, keys, alignment in _blocks(query.shape[2], key.shape[2], form):
            scores, slope = _scores(query[:, :, queries], key[:, :, keys], form, alignment)
            grad_rows = grad_out[:, :, queries].to(dtype)  # [1, heads, queries, value_dim]
            delta = (grad_rows * out[:, :, queries].to(dtype)).sum(-1)  # [1, heads, queries]
            grad_rows, delta, norm = (_grouped(tensor, num_groups) for tensor in (grad_rows, delta, lse[:, :, queries]))
            weights = (scores - norm.to(dtype)[..., None]).exp()
            grad_weights = grad_rows @ _grouped_keys(value[:, :, keys], dtype).mT
            grad_scores = weights * (grad_weights - delta[..., None]) * form.scale
            if slope is not None:
                grad_scores = grad_scores * slope
            grad_query[:, :, queries] = (grad_scores @ _grouped_keys(key[:, :, keys], dtype)).flatten(1, 2)
            query_rows = _grouped(query[:, :, queries].to(dtype), num_groups)  # [1, kv_heads, ..., queries, dim]
            grad_key[:, :, keys] += (grad_scores.mT @ query_rows).sum(2)  # [1, kv_heads, keys, head_dim]
            grad_value[:, :, keys] += (weights.mT @ grad_rows).sum(2)  # [1, kv_heads, keys, value_dim]
        return grad_query, grad_key, grad_value


def _blocks(num_queries: int, num_keys: int, form: Form) -> Iterator[tuple[slice, slice, int]]:
    """(queries, the keys that any of them sees, at which of these keys the first query stands)."""
    offset = num_keys - num_queries  # query i stands at key i + offset
    for first, last in pairwise(form.borders or (0, num_queries)):
        for start in range(first, last, QUERIES_AT_ONCE):
            stop = min(start + QUERIES_AT_ONCE, last)
            key_start = first if form.reach is None else max(first, start + offset - form.reach)
            key_stop = (stop if form.causal else last) + offset
            yield slice(start, stop), slice(key_start, key_stop), start + offset - key_start


def _scores(query: Tensor, key: Tensor, form: Form, alignment: int) -> tuple[Tensor, Tensor | None]:
    """Scores, -inf where unseen, and the slope of the softcap."""
    dtype = wide(query.dtype)
    scores = _grouped(query.to(dtype), key.shape[1]) @ _grouped_keys(key, dtype).mT * form.scale
    slope = None
    if form.softcap is not None:
        capped = torch.tanh(scores / form.softcap)
        scores, slope = form.softcap * capped, 1 - capped * capped
    if form.causal or form.reach is not None:
        stands_at = torch.arange(query.shape[2], device=query.device)[:, None] + alignment  # [num_queries, 1]
        keys = torch.arange(key.shape[2], device=query.device)  # [num_keys]
        unseen = keys > stands_at if form.causal else torch.zeros((), dtype=torch.bool, device=query.device)
        if form.reach is not None:
            unseen = unseen | (keys < stands_at - form.reach)
        scores = scores.masked_fill(unseen, float("-inf"))
    return scores, slope


def _grouped(tensor: Tensor, num_groups: int) -> Tensor:
    """[1, heads, ...] as [1, kv_heads, heads a KV head, ...]."""
    return tensor.reshape(1, num_groups, -1, *tensor.shape[2:])


def _grouped_keys(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, kv_heads, num_keys, dim] as [1, kv_heads, 1, num_keys, dim], for every head of a KV head."""
    return tensor.to(dtype)[:, :, None]
