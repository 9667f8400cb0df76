"""The interface of attention kernels, and the merge of their results over several blocks of keys.

Everything above is written against (out, lse) and a backward that takes them as given: so attention over several blocks
of keys is exact. Forward results merge by their LSE, and the backward of a block is right once it gets the out and lse
of all blocks (FlashAttention-2, arXiv 2307.08691, section 3.1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor


class Form(NamedTuple):
    """The form of an attention: the keys that a query sees, and what is done to its scores.

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


class AttentionKernel(ABC):
    """Attention of queries to keys.

    query is [1, heads, num_queries, head_dim]; key and value are [1, kv_heads, num_keys, head_dim], with any strides;
    query head h belongs to KV head h // (heads // kv_heads). Every query sees at least one key. Values, and with them
    the result, may have heads of another size, unless it takes `one_head_size`. Where it takes `squares_only`, there
    are as many queries as keys under a mask. `device_type`: the only one it runs on, if there is one.
    """

    name: str
    device_type: str | None = None
    one_head_size = False
    squares_only = False
    has_window = True
    has_softcap = True

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """Reason that it cannot serve such tensors; None if it can. `head_dims`: of queries and keys, and of values."""
        if self.device_type not in (None, device.type):
            return f"it runs on a {'CUDA GPU' if self.device_type == 'cuda' else 'CPU'}, not on {device.type}"
        if self.one_head_size and head_dims[0] != head_dims[1]:
            return f"its values have heads of the size of its keys, not of {head_dims[1]} with {head_dims[0]}"
        if form.reach is not None and not self.has_window:
            return "it has no sliding window"
        return "it has no softcap" if form.softcap is not None and not self.has_softcap else None

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """Attend to all keys that `form` lets each query see.

        Returns out [1, heads, num_queries, head_dim] in the dtype of `query`, and lse, the log-sum-exp of the scores,
        [1, heads, num_queries] in at least float32.
        """

    @abstractmethod
    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; `out` and `lse` are those over all the keys the queries attend to."""


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, from attention over those of each.

    out [1, heads, num_queries, head_dim] comes back in the dtype of `lse` [1, heads, num_queries].
    """
    share = torch.sigmoid(block_lse - lse)[..., None]  # of the block, [1, heads, num_queries, 1]
    return torch.lerp(out.to(lse.dtype), block_out.to(lse.dtype), share), torch.logaddexp(lse, block_lse)
