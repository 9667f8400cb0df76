"""The `flash-attn-4` package on a Hopper GPU or a newer one. It compiles its kernels when they are first called.

Called are two of its own functions, which it promises to nobody: what they take is looked at before they are chosen.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from chunkplan_runtime.attention.form import Form
from chunkplan_runtime.attention.varlen import heads_first, runs_of, tokens_first, why_not_flash

_RUNS = (
    *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal", "softcap"),
    *("window_size_left", "window_size_right"),
)

#: What is called, and the arguments it is given, all of them by name.
_CALLED = {
    "_flash_attn_fwd": {"q", "k", "v", *_RUNS, "return_lse"},
    "_flash_attn_bwd": {"q", "k", "v", "out", "dout", "lse", *_RUNS, "deterministic"},
}


class FlashAttn4Kernel:
    """See `kernel.AttentionKernel`. Deterministic where `torch.use_deterministic_algorithms` asks for it."""

    name = "flash-attn-4"
    squares_only = False

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """See `kernel.AttentionKernel.why_not`."""
        if _version() is None:
            return "the package flash-attn-4 is not installed"
        if reason := why_not_flash(device, dtype, head_dims):
            return reason
        if torch.cuda.get_device_capability(device) < (9, 0):
            return "it needs compute capability 9.0"
        return why_not_installed()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """See `kernel.AttentionKernel.forward`."""
        q, k, v = tokens_first(query, key, value)
        out, lse, *_ = _interface()._flash_attn_fwd(q=q, k=k, v=v, **_arguments(query, key, form), return_lse=True)
        return next(heads_first(out)), lse[None]

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernel.AttentionKernel.backward`."""
        names = ("dout", "q", "k", "v", "out")
        given = (tensor.contiguous() for tensor in tokens_first(grad_out, query, key, value, out))
        gradients = _interface()._flash_attn_bwd(
            **dict(zip(names, given, strict=True)),
            lse=lse[0].contiguous(),
            **_arguments(query, key, form),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        grad_query, grad_key, grad_value = heads_first(*gradients[:3])
        return grad_query, grad_key, grad_value


@cache
def why_not_installed() -> str | None:
    """Why the flash-attn-4 that is installed cannot be called; None if it can, or if there is none."""
    found = _version()
    if found is None:
        return None
    try:
        signatures = {name: inspect.signature(getattr(_interface(), name)).parameters for name in _CALLED}
    except Exception as error:  # its compiler is not there, or another flash_attn is in its place
        return f"flash-attn-4 cannot be imported ({error})"
    for name, arguments in _CALLED.items():
        needed = {each for each, one in signatures[name].items() if one.default is inspect.Parameter.empty}
        if not needed <= arguments <= signatures[name].keys():
            return f"{name} of flash-attn-4 {found} takes other things than it is given"
    return None


@cache
def _version() -> str | None:
    """Of the package, which is a folder of the one that flash-attn has too; None if it is not installed."""
    try:
        return version("flash-attn-4") if find_spec("flash_attn") is not None else None
    except PackageNotFoundError:
        return None


def _interface() -> Any:
    """The module with the parts of flash-attn-4 that give and take the LSE. Imported late: it brings a compiler."""
    from flash_attn.cute import interface  # type: ignore[import-not-found]

    return interface


def _arguments(query: Tensor, key: Tensor, form: Form) -> dict[str, object]:
    """Those of `_RUNS`; where there is no bound of a window it is None."""
    runs = runs_of(query, key, form)
    bounds = runs.queries, runs.keys, runs.longest_query, runs.longest_key
    how = form.scale, form.causal, form.softcap or 0.0, form.reach, None
    return dict(zip(_RUNS, (*bounds, *how), strict=True))
