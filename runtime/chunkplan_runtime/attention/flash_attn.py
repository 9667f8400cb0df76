"""The packages `flash-attn` (version 2) and `flash-attn-4` on a CUDA GPU: FlashAttention with softcap.

Called are two of each one's own functions, which it promises to nobody: what they take is looked at before they are
chosen. Version 4 is for a Hopper GPU or a newer one, and compiles its kernels when they are first called.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from chunkplan_runtime.attention.flash import FlashKernel, Runs
from chunkplan_runtime.attention.kernel import Form

#: The first version of flash-attn that is called, and the first that is not any more.
_VERSIONS = ((2, 8), (3, 0))

_BOUNDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_RUNS_2 = (
    *_BOUNDS,
    *("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes"),
)
_RUNS_4 = (*_BOUNDS, "softmax_scale", "causal", "softcap", "window_size_left", "window_size_right")

#: What is called of version 2: the arguments it is given, which have to be its first ones, and how many results it has.
_CALLED_2 = {
    "_wrapped_flash_attn_varlen_forward": (("q", "k", "v", *_RUNS_2), 4),
    "_wrapped_flash_attn_varlen_backward": (
        ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", *_RUNS_2, "deterministic"),
        1,
    ),
}

#: What is called of version 4, and the arguments it is given, all of them by name.
_CALLED_4 = {
    "_flash_attn_fwd": {"q", "k", "v", *_RUNS_4, "return_lse"},
    "_flash_attn_bwd": {"q", "k", "v", "out", "dout", "lse", *_RUNS_4, "deterministic"},
}


class FlashAttn2Kernel(FlashKernel):
    """FlashAttention-2 of the package `flash-attn`."""

    name = "flash-attn-2"

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """See `kernel.AttentionKernel.why_not`."""
        if not _has_2():
            return "the package flash-attn is not installed"
        return super().why_not(device, dtype, head_dims, form) or why_not_2()

    def _forward(self, tensors: list[Tensor], runs: Runs, form: Form) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _interface_2()._wrapped_flash_attn_varlen_forward(*tensors, **_arguments_2(runs, form))
        return out, lse

    def _backward(self, tensors: list[Tensor], lse: Tensor, runs: Runs, form: Form) -> list[Tensor]:
        given = [tensor.contiguous() for tensor in tensors]
        gradients = [torch.empty_like(tensor) for tensor in given[1:4]]
        deterministic = torch.are_deterministic_algorithms_enabled()
        _interface_2()._wrapped_flash_attn_varlen_backward(
            *given, lse, *gradients, **_arguments_2(runs, form), deterministic=deterministic
        )
        return gradients


class FlashAttn4Kernel(FlashKernel):
    """FlashAttention-4 of the package `flash-attn-4`."""

    name = "flash-attn-4"

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """See `kernel.AttentionKernel.why_not`."""
        if _version_4() is None:
            return "the package flash-attn-4 is not installed"
        if reason := super().why_not(device, dtype, head_dims, form):
            return reason
        if torch.cuda.get_device_capability(device) < (9, 0):
            return "it needs compute capability 9.0"
        return why_not_4()

    def _forward(self, tensors: list[Tensor], runs: Runs, form: Form) -> tuple[Tensor, Tensor]:
        q, k, v = tensors
        out, lse, *_ = _interface_4()._flash_attn_fwd(q=q, k=k, v=v, **_arguments_4(runs, form), return_lse=True)
        return out, lse

    def _backward(self, tensors: list[Tensor], lse: Tensor, runs: Runs, form: Form) -> list[Tensor]:
        given = zip(("dout", "q", "k", "v", "out"), (tensor.contiguous() for tensor in tensors), strict=True)
        deterministic = torch.are_deterministic_algorithms_enabled()
        gradients = _interface_4()._flash_attn_bwd(
            **dict(given), lse=lse, **_arguments_4(runs, form), deterministic=deterministic
        )
        return list(gradients[:3])


@cache
def why_not_2() -> str | None:
    """Why the flash-attn that is installed cannot be called; None if it can, or if there is none."""
    if not _has_2():
        return None
    try:
        package, interface = import_module("flash_attn"), _interface_2()
    except Exception as error:  # built for another torch, which may show as anything, or only a part of it is there
        return f"flash-attn cannot be imported ({error})"
    found = str(getattr(package, "__version__", "of no version"))
    numbers = re.match(r"(\d+)\.(\d+)", found)
    start, stop = (".".join(map(str, each)) for each in _VERSIONS)
    if numbers is None or not _VERSIONS[0] <= (int(numbers[1]), int(numbers[2])) < _VERSIONS[1]:
        return f"flash-attn {found} is installed, needed is {start} or newer, below {stop}"
    for name, (arguments, num_results) in _CALLED_2.items():
        schema = getattr(getattr(getattr(interface, name, None), "default", None), "_schema", None)
        if schema is None:
            return f"flash-attn {found} has no operator {name}"
        first, rest = schema.arguments[: len(arguments)], schema.arguments[len(arguments) :]
        has_other = [argument.name for argument in first] != list(arguments)
        if has_other or len(schema.returns) != num_results or not all(each.has_default_value() for each in rest):
            return f"{name} of flash-attn {found} takes or gives other things than that of {start}"
    return None


@cache
def why_not_4() -> str | None:
    """Why the flash-attn-4 that is installed cannot be called; None if it can, or if there is none."""
    found = _version_4()
    if found is None:
        return None
    try:
        signatures = {name: inspect.signature(getattr(_interface_4(), name)).parameters for name in _CALLED_4}
    except Exception as error:  # its compiler is not there, or another flash_attn is in its place
        return f"flash-attn-4 cannot be imported ({error})"
    for name, arguments in _CALLED_4.items():
        needed = {each for each, one in signatures[name].items() if one.default is inspect.Parameter.empty}
        if not needed <= arguments <= signatures[name].keys():
            return f"{name} of flash-attn-4 {found} takes other things than it is given"
    return None


def _has_2() -> bool:
    """Whether the package is installed, and not flash-attn-4 alone, which is a folder in one that has no file."""
    spec = find_spec("flash_attn")
    return spec is not None and spec.origin is not None


@cache
def _version_4() -> str | None:
    """Of the package, which is a folder of the one that flash-attn has too; None if it is not installed."""
    try:
        return version("flash-attn-4") if find_spec("flash_attn") is not None else None
    except PackageNotFoundError:
        return None


def _interface_2() -> Any:
    """The module with the parts of flash-attn that give and take the LSE. Imported late: its import loads CUDA."""
    return import_module("flash_attn.flash_attn_interface")


def _interface_4() -> Any:
    """The module with the parts of flash-attn-4 that give and take the LSE. Imported late: it brings a compiler."""
    return import_module("flash_attn.cute.interface")


def _arguments_2(runs: Runs, form: Form) -> dict[str, object]:
    """Those of `_RUNS_2`."""
    how = 0.0, form.scale, form.causal, runs.left, runs.right, form.softcap or 0.0, None
    return dict(zip(_RUNS_2, (*runs.bounds, *how), strict=True))


def _arguments_4(runs: Runs, form: Form) -> dict[str, object]:
    """Those of `_RUNS_4`; where there is no bound of a window it is None."""
    how = form.scale, form.causal, form.softcap or 0.0, form.reach, None
    return dict(zip(_RUNS_4, (*runs.bounds, *how), strict=True))
