"""PyTorch's fused attention on a CPU, in float64, float32, float16 or bfloat16."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from chunkplan_runtime.attention.form import Form

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TorchCpuKernel:
    """See `kernel.AttentionKernel`."""

    name = "torch-cpu"
    squares_only = True  # ATen aligns queries and keys at their starts

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
        found = [_forward(*run, 0.0, form.causal, scale=form.scale) for run in _runs(form, query, key, value)]
        out, lse = _joined(found)
        return out, lse

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernel.AttentionKernel.backward`.

        In dtypes below float32 the operator would add up the heads of a KV head in them: each has a KV head there.
        """
        given = [grad_out, query, key, value, out, lse]
        if is_narrow := query.dtype != lse.dtype:
            group = query.size(1) // key.size(1)
            given = [each[0].view(key.size(1), -1, *each.shape[2:]) for each in given]
            given[2:4] = [each.expand(-1, group, -1, -1) for each in given[2:4]]  # [kv_heads, group, num_keys, dim]
        found = [_backward(*run, 0.0, form.causal, scale=form.scale) for run in _runs(form, *given)]
        grad_query, *pair = _joined(found)
        if is_narrow:
            grad_query, pair = grad_query.flatten(0, 1)[None], [each.sum(1, dtype=lse.dtype)[None] for each in pair]
        return grad_query, pair[0], pair[1]


def _runs(form: Form, *tensors: Tensor) -> Iterable[Sequence[Tensor]]:
    """Those of [1, heads, num_tokens, ...] each, for a call each."""
    if form.borders is None or len(form.borders) == 2:
        return (tensors,)
    lengths = [stop - start for start, stop in pairwise(form.borders)]
    return zip(*(each.split_with_sizes(lengths, 2) for each in tensors), strict=True)


def _joined(runs: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """What calls gave for their runs, [1, heads, tokens, ...] each, for all tokens."""
    return runs[0] if len(runs) == 1 else [torch.cat(each, 2) for each in zip(*runs, strict=True)]
