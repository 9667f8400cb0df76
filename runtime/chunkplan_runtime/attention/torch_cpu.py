"""PyTorch's fused attention on a CPU, in float64, float32, float16 or bfloat16."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from chunkplan_runtime.attention.kernel import AttentionKernel, Form

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TorchCpuKernel(AttentionKernel):
    """ATen's, which aligns queries and keys at their starts."""

    name = "torch-cpu"
    device_type = "cpu"
    one_head_size = squares_only = True
    has_window = has_softcap = False

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
        group = query.size(1) // key.size(1)
        if is_expanded := group > 1 and query.dtype != lse.dtype:
            key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        runs = _runs(form, grad_out, query, key, value, out, lse)
        grad_query, *pair = _joined([_backward(*run, 0.0, form.causal, scale=form.scale) for run in runs])
        if is_expanded:
            pair = [each.view(1, -1, group, *each.shape[2:]).sum(2, dtype=lse.dtype) for each in pair]
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
