"""What an attention kernel is asked and gives, and how results over several blocks of keys are merged.

Everything above is written against (out, lse) and a backward that takes them as given, because that is what makes
attention over several blocks of keys exact: forward results merge by their LSE, and the backward of a block is right
once it gets the out and lse of all blocks (FlashAttention-2, arXiv 2307.08691, section 3.1).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Form(NamedTuple):
    """Which keys a query sees, and what is done to its scores.

    Queries and keys are aligned at their ends (bottom-right): of `num_queries` and `num_keys`, query i stands at key
    i + num_keys - num_queries. With `causal` it sees no key after that one; with `reach` none that lies more than
    `reach` before it. `borders` (0, ..., num_queries) cuts queries and keys, of which there are as many, into runs that
    do not see each other. `softcap` turns a scaled score s into softcap * tanh(s / softcap).
    """

    scale: float
    causal: bool
    reach: int | None = None
    softcap: float | None = None
    borders: tuple[int, ...] | None = None


class AttentionKernel(Protocol):
    """Attention of queries to keys.

    query is [1, heads, num_queries, head_dim]; key and value are [1, kv_heads, num_keys, head_dim], with any strides;
    query head h belongs to KV head h // (heads // kv_heads). Every query sees at least one key. Values, and with them
    the result, may have heads of another size. Where it takes `squares_only`, there are as many queries as keys under a
    mask.
    """

    name: str
    squares_only: bool

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """Why it cannot serve such tensors; None if it can. `head_dims`: of queries and keys, and of values."""
        ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """Attend to all keys that `form` lets each query see.

        Returns out [1, heads, num_queries, head_dim] in the dtype of `query`, and lse, the log-sum-exp of the scores,
        [1, heads, num_queries] in at least float32.
        """
        ...

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; `out` and `lse` are those over all the keys the queries attend to."""
        ...


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, from attention over those of each.

    out [1, heads, num_queries, head_dim] comes back in the dtype of `lse` [1, heads, num_queries].
    """
    share = torch.sigmoid(block_lse - lse)[..., None]  # of the block, [1, heads, num_queries, 1]
    return torch.lerp(out.to(lse.dtype), block_out.to(lse.dtype), share), torch.logaddexp(lse, block_lse)
