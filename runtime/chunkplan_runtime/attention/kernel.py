"""What an attention kernel does, and which one serves a device.

Everything above is written against (out, lse) and a backward that takes them as given, because that is what makes
attention over several blocks of keys exact: forward results merge by their LSE, and the backward of a block is right
once it gets the out and lse of all blocks (FlashAttention-2, arXiv 2307.08691, section 3.1).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from chunkplan.errors import UsageError
from chunkplan_runtime.attention.cpu import CpuKernel


class AttentionKernel(Protocol):
    """Attention of one run of queries to one run of keys.

    query is [heads, num_queries, head_dim]; key and value are [kv_heads, num_keys, head_dim], where query head h
    belongs to KV head h // (heads // kv_heads). With `causal`, query i sees keys 0 to i and num_queries == num_keys;
    without, every query sees every key.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """out [heads, num_queries, head_dim] in the dtype of `query`, lse [heads, num_queries] in at least float32."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; `out` and `lse` are those over all the keys the queries attend to."""
        ...


_KERNELS: dict[str, AttentionKernel] = {"cpu": CpuKernel()}


def kernel_for(device: torch.device) -> AttentionKernel:
    """The kernel for tensors on `device`.

    Raises:
        UsageError: there is none for this type of device.
    """
    if device.type not in _KERNELS:
        raise UsageError(
            f"there is no attention kernel for device type {device.type!r}",
            hint=f"this version runs on: {', '.join(sorted(_KERNELS))}",
        )
    return _KERNELS[device.type]
