"""PyTorch's fused attention on a CPU, in float64, float32, float16 or bfloat16."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from chunkplan_runtime.attention.form import Form, merge
from chunkplan_runtime.dtypes import wide

_aten = torch.ops.aten


class TorchCpuKernel:
    """See `kernel.AttentionKernel`. KV heads are expanded by strides, so that the prefix is never copied for it."""

    name = "torch-cpu"

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """See `kernel.AttentionKernel.why_not`."""
        if device.type != "cpu":
            return f"it runs on a CPU, not on {device.type}"
        if head_dims[0] != head_dims[1]:
            return f"its values have heads of the size of its keys, not of {head_dims[1]} with {head_dims[0]}"
        if form.reach is not None:
            return "it has no sliding window"
        return "it has no softcap" if form.softcap is not None else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """See `kernel.AttentionKernel.forward`."""
        if form.borders is None:
            return _forward(query, key, value, form)
        runs = [
            _forward(query[:, start:stop], key[:, start:stop], value[:, start:stop], form)
            for start, stop in pairwise(form.borders)
        ]
        return torch.cat([out for out, _ in runs], 1), torch.cat([lse for _, lse in runs], 1)

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernel.AttentionKernel.backward`."""
        if form.borders is None:
            return _backward(form, grad_out, query, key, value, out, lse)
        runs = [
            _backward(form, *(tensor[:, start:stop] for tensor in (grad_out, query, key, value, out, lse)))
            for start, stop in pairwise(form.borders)
        ]
        grad_query, grad_key, grad_value = (torch.cat(gradients, 1) for gradients in zip(*runs, strict=True))
        return grad_query, grad_key, grad_value


def _forward(query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    earlier = key.shape[1] - query.shape[1]
    if not (form.causal and earlier):
        return _call(query, key, value, form)
    # ATen aligns queries and keys at their starts, so keys before the first query are a block of their own.
    out, lse = _call(query, key[:, earlier:], value[:, earlier:], form)
    unmasked = Form(form.scale, causal=False)
    out, lse = merge(out, lse, *_call(query, key[:, :earlier], value[:, :earlier], unmasked))
    return out.to(query.dtype), lse


def _call(query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    key, value = _expand(query, key), _expand(query, value)  # [kv_heads, heads a KV head, num_keys, head_dim]
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        _group(query, key), key, value, 0.0, form.causal, scale=form.scale
    )
    return out.flatten(0, 1), lse.flatten(0, 1)  # [heads, num_queries, head_dim], [heads, num_queries]


def _backward(
    form: Form, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    earlier = key.shape[1] - query.shape[1]
    if not (form.causal and earlier):
        return _call_backward(grad_out, query, key, value, out, lse, form)
    grad_query, *own = _call_backward(grad_out, query, key[:, earlier:], value[:, earlier:], out, lse, form)
    unmasked = Form(form.scale, causal=False)
    more, *prefix = _call_backward(grad_out, query, key[:, :earlier], value[:, :earlier], out, lse, unmasked)
    grad_key, grad_value = (torch.cat(both, 1) for both in zip(prefix, own, strict=True))
    return grad_query.to(lse.dtype) + more, grad_key, grad_value


def _call_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    key, value = _expand(query, key), _expand(query, value)  # [kv_heads, heads a KV head, num_keys, head_dim]
    grad_out, query, out, lse = (_group(tensor, key) for tensor in (grad_out, query, out, lse))
    grad_query, *expanded = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, lse, 0.0, form.causal, scale=form.scale
    )
    grad_key, grad_value = (gradient.sum(1, dtype=wide(key.dtype)) for gradient in expanded)  # [kv_heads, ...]
    return grad_query.flatten(0, 1), grad_key, grad_value


def _expand(query: Tensor, tensor: Tensor) -> Tensor:
    """[kv_heads, num_keys, head_dim] as [kv_heads, query heads a KV head, num_keys, head_dim], without a copy."""
    kv_heads, num_keys, head_dim = tensor.shape
    return tensor[:, None].expand(kv_heads, query.shape[0] // kv_heads, num_keys, head_dim)


def _group(tensor: Tensor, key: Tensor) -> Tensor:
    """[heads, ...] as [kv_heads, heads a KV head, ...], as expanded keys have them."""
    return tensor.reshape(*key.shape[:2], *tensor.shape[1:])
