"""The attention kernel of the CPU: ATen's flash attention, in float64, float32 or bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

_aten = torch.ops.aten


class CpuKernel:
    """See `kernel.AttentionKernel`. ATen wants as many KV heads as query heads, so they are expanded for the call."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """See `kernel.AttentionKernel.forward`."""
        groups = query.shape[0] // key.shape[0]
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query[None], _expand(key, groups), _expand(value, groups), 0.0, causal, scale=scale
        )
        return out[0], lse[0]

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
        """See `kernel.AttentionKernel.backward`."""
        groups = query.shape[0] // key.shape[0]
        grad_query, grad_key, grad_value = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out[None],
            query[None],
            _expand(key, groups),
            _expand(value, groups),
            out[None],
            lse[None],
            0.0,
            causal,
            scale=scale,
        )
        return grad_query[0], _fold(grad_key[0], groups), _fold(grad_value[0], groups)


def _expand(tensor: Tensor, groups: int) -> Tensor:
    return tensor.repeat_interleave(groups, 0)[None] if groups > 1 else tensor[None]


def _fold(gradient: Tensor, groups: int) -> Tensor:
    """Sum the gradients of the query heads that share a KV head, in at least float32."""
    if groups == 1:
        return gradient
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.view(-1, groups, *gradient.shape[1:]).sum(1, dtype=dtype)
