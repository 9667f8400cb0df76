"""PyTorch's fused attention on a CPU, in float64, float32, float16 or bfloat16."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from chunkplan_runtime.attention.form import Form, merge

_aten = torch.ops.aten

Pair = tuple[Tensor, Tensor]


class TorchCpuKernel:
    """See `kernel.AttentionKernel`."""

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
        found = [_forward(form, *run) for run in _runs(form, query, key, value)]
        out, lse = found[0] if len(found) == 1 else map(_joined, zip(*found, strict=True))
        return out[0], lse[0]

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernel.AttentionKernel.backward`.

        Gradients are computed in at least float32: in narrower dtypes the operator would add up the heads of a KV head.
        """
        given = [grad_out, query, key, value, out]
        if query.dtype != lse.dtype:
            given = [each.to(lse.dtype) for each in given]
        found = [_backward(form, *run) for run in _runs(form, *given, lse)]
        grad_query, grad_key, grad_value = found[0] if len(found) == 1 else map(_joined, zip(*found, strict=True))
        return grad_query[0], grad_key[0], grad_value[0]


def _runs(form: Form, *tensors: Tensor) -> Iterable[Sequence[Tensor]]:
    """Those of [heads, num_tokens, ...] each, as [1, heads, tokens of the run, ...]."""
    batches = [each[None] for each in tensors]
    if form.borders is None or len(form.borders) == 2:
        return (batches,)
    lengths = [stop - start for start, stop in pairwise(form.borders)]
    return zip(*(torch.split(each, lengths, 2) for each in batches), strict=True)


def _joined(runs: Sequence[Tensor]) -> Tensor:
    """[1, heads, num_tokens, ...] of those of runs, in memory tokens first, as the operators have it."""
    return torch.cat([each.transpose(1, 2) for each in runs], 1).transpose(1, 2)


def _forward(form: Form, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    own, before = _blocks(form, query, key, value)
    if before is None:
        return _call(form.causal, form.scale, query, *own)
    out, lse = merge(*_call(True, form.scale, query, *own), *_call(False, form.scale, query, *before))
    return out.to(query.dtype), lse


def _backward(
    form: Form, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> Sequence[Tensor]:
    own, before = _blocks(form, query, key, value)
    if before is None:
        return _call_backward(form.causal, form.scale, grad_out, query, *own, out, lse)
    grad_query, *of_own = _call_backward(True, form.scale, grad_out, query, *own, out, lse)
    more, *of_before = _call_backward(False, form.scale, grad_out, query, *before, out, lse)
    return grad_query.add_(more), *(torch.cat(both, 2) for both in zip(of_before, of_own, strict=True))


def _blocks(form: Form, query: Tensor, key: Tensor, value: Tensor) -> tuple[Pair, Pair | None]:
    """Keys and values for one call, and those before the first query, which are a block of their own under a mask.

    ATen aligns queries and keys at their starts.
    """
    num_queries, earlier = query.size(2), key.size(2) - query.size(2)
    if not (form.causal and earlier):
        return (key, value), None
    own = key.narrow(2, earlier, num_queries), value.narrow(2, earlier, num_queries)
    return own, (key.narrow(2, 0, earlier), value.narrow(2, 0, earlier))


def _call(causal: bool, scale: float, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, causal, scale=scale)
    return out, lse


def _call_backward(causal: bool, scale: float, *tensors: Tensor) -> Sequence[Tensor]:
    found: Sequence[Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, 0.0, causal, scale=scale
    )
    return found
