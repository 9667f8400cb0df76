"""PyTorch's own FlashAttention-2 on a CUDA GPU, by the operators that `torch.nn.attention.varlen` is made of.

The operators are called themselves, as `varlen_attn` gives its backward the LSE of its own keys only and has no GQA in
torch 2.11.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from chunkplan_runtime.attention.form import Form
from chunkplan_runtime.attention.varlen import heads_first, runs_of, tokens_first, why_not_flash, window_of

_aten = torch.ops.aten


class TorchCudaKernel:
    """See `kernel.AttentionKernel`. Deterministic where `torch.use_deterministic_algorithms` asks for it."""

    name = "torch-cuda"
    squares_only = False

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """See `kernel.AttentionKernel.why_not`."""
        return "it has no softcap" if form.softcap is not None else why_not_flash(device, dtype, head_dims)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """See `kernel.AttentionKernel.forward`."""
        runs, (left, right) = runs_of(query, key, form), window_of(form)
        out, lse, *_ = _aten._flash_attention_forward(
            *tokens_first(query, key, value),
            runs.queries,
            runs.keys,
            runs.longest_query,
            runs.longest_key,
            0.0,
            form.causal,
            return_debug_mask=False,
            scale=form.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return next(heads_first(out)), lse[None]

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernel.AttentionKernel.backward`."""
        runs, (left, right) = runs_of(query, key, form), window_of(form)
        gradients = _aten._flash_attention_backward(
            *tokens_first(grad_out, query, key, value, out),
            lse[0].contiguous(),
            runs.queries,
            runs.keys,
            runs.longest_query,
            runs.longest_key,
            0.0,
            form.causal,
            _no_dropout(query.device),
            query.new_empty(0),
            scale=form.scale,
            window_size_left=left,
            window_size_right=right,
        )
        grad_query, grad_key, grad_value = heads_first(*gradients)
        return grad_query, grad_key, grad_value


@cache
def _no_dropout(device: torch.device) -> Tensor:
    """The state of random numbers that nothing is drawn by. To make it is a kernel, so that it is made once."""
    return torch.zeros(2, dtype=torch.uint64, device=device)
