"""The `flash-attn` package, version 2, on a CUDA GPU: as PyTorch's own, and with softcap."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from chunkplan_runtime.attention.form import Form
from chunkplan_runtime.attention.varlen import runs_of, why_not_flash, window_of


class FlashAttn2Kernel:
    """See `kernel.AttentionKernel`. Deterministic where `torch.use_deterministic_algorithms` asks for it."""

    name = "flash-attn-2"

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int, form: Form) -> str | None:
        """See `kernel.AttentionKernel.why_not`."""
        if find_spec("flash_attn") is None:
            return "the package flash-attn is not installed"
        reason = why_not_flash(device, dtype, head_dim)
        if reason is None:
            try:
                _interface()
            except (ImportError, OSError) as error:  # built for another torch, or only a part of it is there
                reason = f"flash-attn cannot be imported ({error})"
        return reason

    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """See `kernel.AttentionKernel.forward`."""
        out, lse, *_ = _interface()._wrapped_flash_attn_varlen_forward(
            *(tensor.transpose(0, 1) for tensor in (query, key, value)), **_arguments(query, key, form)
        )
        return out.transpose(0, 1), lse

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernel.AttentionKernel.backward`."""
        given = [tensor.transpose(0, 1).contiguous() for tensor in (grad_out, query, key, value, out)]
        gradients = [torch.empty_like(tensor) for tensor in given[1:4]]
        _interface()._wrapped_flash_attn_varlen_backward(
            *given,
            lse.contiguous(),
            *gradients,
            **_arguments(query, key, form),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        grad_query, grad_key, grad_value = (gradient.transpose(0, 1) for gradient in gradients)
        return grad_query, grad_key, grad_value


def _interface() -> Any:
    """The module with the parts of flash-attn that give and take the LSE. Imported late: its import loads CUDA."""
    from flash_attn import flash_attn_interface  # type: ignore[import-not-found]

    return flash_attn_interface


def _arguments(query: Tensor, key: Tensor, form: Form) -> dict[str, Any]:
    runs, (left, right) = runs_of(query, key, form), window_of(form)
    return {
        "cu_seqlens_q": runs.queries,
        "cu_seqlens_k": runs.keys,
        "max_seqlen_q": runs.longest_query,
        "max_seqlen_k": runs.longest_key,
        "dropout_p": 0.0,
        "softmax_scale": form.scale,
        "causal": form.causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": form.softcap or 0.0,
        "alibi_slopes": None,
    }
