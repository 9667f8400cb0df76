"""The plain kernel: attention as it is written down, in any dtype on any device, a block of queries at a time.

Scores are held for `_QUERIES` queries at once and computed in at least float32. It serves what no fused kernel takes
(float64 on a GPU, softcap, sliding windows on a CPU), and is what the others are tested against.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from chunkplan_runtime.attention.form import Form
from chunkplan_runtime.dtypes import wide

_QUERIES = 256


class ReferenceKernel:
    """See `kernel.AttentionKernel`."""

    name = "reference"

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """See `kernel.AttentionKernel.why_not`: it takes everything."""
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """See `kernel.AttentionKernel.forward`."""
        out = query.new_empty(*query.shape[:2], value.shape[2])
        lse = query.new_empty(query.shape[:2], dtype=wide(query.dtype))
        for queries, keys, alignment in _blocks(query.shape[1], key.shape[1], form):
            scores, _ = _scores(query[:, queries], key[:, keys], form, alignment)
            block_lse = torch.logsumexp(scores, -1)
            block_out = (scores - block_lse[..., None]).exp() @ _grouped_keys(value[:, keys], scores.dtype)
            out[:, queries] = block_out.flatten(0, 1)
            lse[:, queries] = block_lse.flatten(0, 1)
        return out, lse

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernel.AttentionKernel.backward`."""
        dtype, num_groups = wide(query.dtype), key.shape[0]
        grad_query = query.new_empty(query.shape)
        grad_key, grad_value = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
        for queries, keys, alignment in _blocks(query.shape[1], key.shape[1], form):
            scores, slope = _scores(query[:, queries], key[:, keys], form, alignment)
            sent = grad_out[:, queries].to(dtype)
            delta = (sent * out[:, queries].to(dtype)).sum(-1)
            sent, delta, norm = (_grouped(tensor, num_groups) for tensor in (sent, delta, lse[:, queries]))
            weights = (scores - norm.to(dtype)[..., None]).exp()
            grad_scores = weights * (sent @ _grouped_keys(value[:, keys], dtype).mT - delta[..., None]) * form.scale
            if slope is not None:
                grad_scores = grad_scores * slope
            grad_query[:, queries] = (grad_scores @ _grouped_keys(key[:, keys], dtype)).flatten(0, 1)
            asked = _grouped(query[:, queries].to(dtype), num_groups)
            grad_key[:, keys] += (grad_scores.mT @ asked).sum(1)
            grad_value[:, keys] += (weights.mT @ sent).sum(1)
        return grad_query, grad_key, grad_value


def _blocks(num_queries: int, num_keys: int, form: Form) -> Iterator[tuple[slice, slice, int]]:
    """(queries, the keys that any of them sees, at which of these keys the first query stands)."""
    if form.borders is not None:
        for start, end in pairwise(form.borders):
            for queries, keys, alignment in _blocks_of_run(end - start, end - start, form):
                yield _shifted(queries, start), _shifted(keys, start), alignment
    else:
        yield from _blocks_of_run(num_queries, num_keys, form)


def _blocks_of_run(num_queries: int, num_keys: int, form: Form) -> Iterator[tuple[slice, slice, int]]:
    for first in range(0, num_queries, _QUERIES):
        last = min(first + _QUERIES, num_queries)
        first_key = 0 if form.reach is None else max(0, first + num_keys - num_queries - form.reach)
        last_key = last + num_keys - num_queries if form.causal else num_keys
        yield slice(first, last), slice(first_key, last_key), first + num_keys - num_queries - first_key


def _shifted(run: slice, by: int) -> slice:
    return slice(run.start + by, run.stop + by)


def _scores(query: Tensor, key: Tensor, form: Form, alignment: int) -> tuple[Tensor, Tensor | None]:
    """Scores [kv_heads, heads a KV head, num_queries, num_keys], -inf where unseen, and the slope of the softcap."""
    dtype = wide(query.dtype)
    scores = _grouped(query.to(dtype), key.shape[0]) @ _grouped_keys(key, dtype).mT * form.scale
    slope = None
    if form.softcap is not None:
        bent = torch.tanh(scores / form.softcap)
        scores, slope = form.softcap * bent, 1 - bent * bent
    if form.causal or form.reach is not None:
        stands_at = torch.arange(query.shape[1], device=query.device)[:, None] + alignment
        keys = torch.arange(key.shape[1], device=query.device)
        unseen = keys > stands_at if form.causal else torch.zeros((), dtype=torch.bool, device=query.device)
        if form.reach is not None:
            unseen = unseen | (keys < stands_at - form.reach)
        scores = scores.masked_fill(unseen, float("-inf"))
    return scores, slope


def _grouped(tensor: Tensor, num_groups: int) -> Tensor:
    """[heads, ...] as [kv_heads, heads a KV head, ...]."""
    return tensor.reshape(num_groups, -1, *tensor.shape[1:])


def _grouped_keys(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype)[:, None]
