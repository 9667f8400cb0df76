"""The `flash-attn` package, version 2, on a CUDA GPU: as PyTorch's own, and with softcap.

Called are two of its own operators, which it promises to nobody: what they take is looked at before they are chosen.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from typing import Any, TypedDict

import torch
from torch import Tensor

from chunkplan_runtime.attention.form import Form
from chunkplan_runtime.attention.varlen import heads_first, runs_of, tokens_first, why_not_flash, window_of

#: The first version that is called, and the first that is not any more.
_VERSIONS = ((2, 8), (3, 0))

_RUNS = (
    *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p", "softmax_scale", "causal"),
    *("window_size_left", "window_size_right", "softcap", "alibi_slopes"),
)

#: What is called: the arguments it is given, which have to be its first ones, and how many results it has.
_CALLED = {
    "_wrapped_flash_attn_varlen_forward": (("q", "k", "v", *_RUNS), 4),
    "_wrapped_flash_attn_varlen_backward": (
        ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", *_RUNS, "deterministic"),
        1,
    ),
}


class FlashAttn2Kernel:
    """See `kernel.AttentionKernel`. Deterministic where `torch.use_deterministic_algorithms` asks for it."""

    name = "flash-attn-2"
    squares_only = False

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """See `kernel.AttentionKernel.why_not`."""
        if not _is_there():
            return "the package flash-attn is not installed"
        return why_not_flash(device, dtype, head_dims) or why_not_installed()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """See `kernel.AttentionKernel.forward`."""
        out, lse, *_ = _interface()._wrapped_flash_attn_varlen_forward(
            *tokens_first(query, key, value), **_arguments(query, key, form)
        )
        return next(heads_first(out)), lse[None]

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernel.AttentionKernel.backward`."""
        given = [tensor.contiguous() for tensor in tokens_first(grad_out, query, key, value, out)]
        gradients = [torch.empty_like(tensor) for tensor in given[1:4]]
        _interface()._wrapped_flash_attn_varlen_backward(
            *given,
            lse[0].contiguous(),
            *gradients,
            **_arguments(query, key, form),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        grad_query, grad_key, grad_value = heads_first(*gradients)
        return grad_query, grad_key, grad_value


@cache
def why_not_installed() -> str | None:
    """Why the flash-attn that is installed cannot be called; None if it can, or if there is none."""
    if not _is_there():
        return None
    try:
        import flash_attn  # type: ignore[import-not-found]

        interface = _interface()
    except Exception as error:  # built for another torch, which may show as anything, or only a part of it is there
        return f"flash-attn cannot be imported ({error})"
    version = str(getattr(flash_attn, "__version__", "of no version"))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    start, stop = _VERSIONS
    if numbers is None or not start <= (int(numbers[1]), int(numbers[2])) < stop:
        return f"flash-attn {version} is installed, needed is {_dotted(start)} or newer, below {_dotted(stop)}"
    for name, (arguments, num_results) in _CALLED.items():
        schema = getattr(getattr(getattr(interface, name, None), "default", None), "_schema", None)
        if schema is None:
            return f"flash-attn {version} has no operator {name}"
        found, rest = schema.arguments[: len(arguments)], schema.arguments[len(arguments) :]
        has_other = [argument.name for argument in found] != list(arguments)
        if has_other or len(schema.returns) != num_results or not all(each.has_default_value() for each in rest):
            return f"{name} of flash-attn {version} takes or gives other things than that of {_dotted(start)}"
    return None


def _is_there() -> bool:
    """Whether the package is installed, and not flash-attn-4 alone, which is a folder in one that has no file."""
    spec = find_spec("flash_attn")
    return spec is not None and spec.origin is not None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _interface() -> Any:
    """The module with the parts of flash-attn that give and take the LSE. Imported late: its import loads CUDA."""
    from flash_attn import flash_attn_interface

    return flash_attn_interface


class _Arguments(TypedDict):
    """Those of `_RUNS`; borders of runs are int32 [num_runs + 1] on the device."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float
    softmax_scale: float
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float
    alibi_slopes: None


def _arguments(query: Tensor, key: Tensor, form: Form) -> _Arguments:
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
