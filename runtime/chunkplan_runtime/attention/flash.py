"""FlashAttention on a CUDA GPU: PyTorch's own copy, cuDNN's attention, and the packages flash-attn and flash-attn-4.

Of PyTorch the operators are called that `torch.nn.attention.varlen` and `scaled_dot_product_attention` are made of:
`varlen_attn` gives its backward the LSE of its own keys only and has no GQA in torch 2.11. Of each package two of its
own functions are called, which it promises to nobody: what they take is looked at before they are chosen. Version 4 is
for a Hopper GPU or a newer one, and compiles its kernels when they are first called.
"""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from chunkplan_runtime.attention.kernel import AttentionKernel, Form
from chunkplan_runtime.devices import sent

_aten = torch.ops.aten

#: The first version of cuDNN that is called.
_CUDNN_VERSION = 91_000

#: Of cuDNN: lengths that come again are multiples of so many tokens.
_MULTIPLE = 512

#: FLOPs of a forward that a plan of cuDNN is made of whatever its lengths: what each layer gains pays for it.
_LONG_CALL = 2e13

#: Numbers that a tensor with all heads may have for cuDNN.
_MOST_NUMBERS = 2**31

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

#: Borders of runs of queries and of keys, int32 on the device, and the longest run of each.
Bounds = tuple[Tensor, Tensor, int, int]


class FlashKernel(AttentionKernel):
    """A fused kernel on a GPU that takes tokens first, [num_tokens, heads, head_dim], and borders of runs.

    Deterministic where `torch.use_deterministic_algorithms` asks for it. `capability`: of the oldest GPU it runs on.
    """

    device_type = "cuda"
    one_head_size = True
    capability = (8, 0)
    largest_head = 256

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """See `kernel.AttentionKernel.why_not`."""
        if reason := super().why_not(device, dtype, head_dims, form):
            return reason
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
        if torch.cuda.get_device_capability(device) < self.capability:
            return f"it needs compute capability {'.'.join(map(str, self.capability))}"
        fits = head_dims[0] % 8 == 0 and head_dims[0] <= self.largest_head
        return None if fits else f"it has no kernel for heads of {head_dims[0]}"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """See `kernel.AttentionKernel.forward`."""
        out, lse = self._forward(_tokens_first(query, key, value), _bounds(query, key, form), form)
        return out.transpose(0, 1)[None], lse[None]

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernel.AttentionKernel.backward`."""
        tensors = _tokens_first(grad_out, query, key, value, out)
        gradients = self._backward(tensors, lse[0].contiguous(), _bounds(query, key, form), form)
        grad_query, grad_key, grad_value = (each.transpose(0, 1)[None] for each in gradients)
        return grad_query, grad_key, grad_value

    @abstractmethod
    def _forward(self, tensors: list[Tensor], bounds: Bounds, form: Form) -> tuple[Tensor, Tensor]:
        """Out [num_queries, heads, head_dim] and LSE [heads, num_queries] of query, key and value."""

    @abstractmethod
    def _backward(self, tensors: list[Tensor], lse: Tensor, bounds: Bounds, form: Form) -> list[Tensor]:
        """Gradients of query, key and value from that of out, these three, and out."""


class TorchCudaKernel(FlashKernel):
    """PyTorch's own FlashAttention-2."""

    name = "torch-cuda"
    has_softcap = False

    def _forward(self, tensors: list[Tensor], bounds: Bounds, form: Form) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._flash_attention_forward(
            *tensors, *bounds, 0.0, form.causal, return_debug_mask=False, scale=form.scale, **_window(form)
        )
        return out, lse

    def _backward(self, tensors: list[Tensor], lse: Tensor, bounds: Bounds, form: Form) -> list[Tensor]:
        random = _no_dropout(lse.device), tensors[1].new_empty(0)
        found: list[Tensor] = _aten._flash_attention_backward(
            *tensors, lse, *bounds, 0.0, form.causal, *random, scale=form.scale, **_window(form)
        )
        return found


class TorchCudnnKernel(TorchCudaKernel):
    """Attention of cuDNN on a Hopper GPU or a newer one.

    cuDNN makes a plan of every pair of lengths that a process has not met, which takes it a third of a second or more,
    once for forwards and once for backwards. So it is given lengths that come again, as those of whole chunks and pages
    do, and calls next to which a plan is nothing. All others are PyTorch's FlashAttention-2: ends of sequences, and
    sequences side by side, of which PyTorch to 2.14 makes a plan in every call; one key, which cuDNN refuses; and all
    where results have to be the same bits.
    """

    name = "torch-cudnn"
    capability = (9, 0)
    largest_head = 128  # that all versions have a backward for
    has_window = False
    squares_only = True  # cuDNN aligns queries and keys at their starts
    _lse_dims = 4  # of the LSE as PyTorch's operators give and take it: [1, heads, num_queries, 1] in torch 2.11

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """See `kernel.AttentionKernel.why_not`."""
        if reason := super().why_not(device, dtype, head_dims, form):
            return reason
        try:
            there = None if torch.version.hip else torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # there is another one than PyTorch was built for
            return f"cuDNN cannot be called ({str(error).splitlines()[0]})"
        if there is None:
            return "this torch has no cuDNN"
        found, needed = (f"{each // 10_000}.{each // 100 % 100}" for each in (there, _CUDNN_VERSION))
        return None if there >= _CUDNN_VERSION else f"cuDNN {found} is there, needed is {needed} or newer"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """See `kernel.AttentionKernel.forward`."""
        if not _is_for_cudnn(query, key, form):
            return super().forward(query, key, value, form)
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, form.causal, False, scale=form.scale
        )
        self._lse_dims = lse.dim()
        return out, lse.reshape(query.shape[:3])

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernel.AttentionKernel.backward`."""
        if not _is_for_cudnn(query, key, form):
            return super().backward(grad_out, query, key, value, out, lse, form)
        # A plan is found again by the strides of queries, keys and values alone: the others have the same every time.
        grad_out, out = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (grad_out, out))
        lse = lse.contiguous()
        no_dropout = query.new_empty((), dtype=torch.int64)
        grad_query, grad_key, grad_value = _aten._scaled_dot_product_cudnn_attention_backward(
            *(grad_out, query, key, value, out, lse if self._lse_dims == 3 else lse[..., None]),
            *(no_dropout, no_dropout, None, None, None, query.size(2), key.size(2), 0.0, form.causal),
            scale=form.scale,
        )
        return grad_query, grad_key, grad_value


class FlashAttn2Kernel(FlashKernel):
    """FlashAttention-2 of the package `flash-attn`."""

    name = "flash-attn-2"

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """See `kernel.AttentionKernel.why_not`."""
        if not _has_2():
            return "the package flash-attn is not installed"
        return super().why_not(device, dtype, head_dims, form) or why_not_2()

    def _forward(self, tensors: list[Tensor], bounds: Bounds, form: Form) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _interface_2()._wrapped_flash_attn_varlen_forward(*tensors, **_arguments_2(bounds, form))
        return out, lse

    def _backward(self, tensors: list[Tensor], lse: Tensor, bounds: Bounds, form: Form) -> list[Tensor]:
        given = [tensor.contiguous() for tensor in tensors]
        gradients = [torch.empty_like(tensor) for tensor in given[1:4]]
        deterministic = torch.are_deterministic_algorithms_enabled()
        _interface_2()._wrapped_flash_attn_varlen_backward(
            *given, lse, *gradients, **_arguments_2(bounds, form), deterministic=deterministic
        )
        return gradients


class FlashAttn4Kernel(FlashKernel):
    """FlashAttention-4 of the package `flash-attn-4`."""

    name = "flash-attn-4"
    capability = (9, 0)

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """See `kernel.AttentionKernel.why_not`."""
        if _version_4() is None:
            return "the package flash-attn-4 is not installed"
        return super().why_not(device, dtype, head_dims, form) or why_not_4()

    def _forward(self, tensors: list[Tensor], bounds: Bounds, form: Form) -> tuple[Tensor, Tensor]:
        q, k, v = tensors
        out, lse, *_ = _interface_4()._flash_attn_fwd(q=q, k=k, v=v, **_arguments_4(bounds, form), return_lse=True)
        return out, lse

    def _backward(self, tensors: list[Tensor], lse: Tensor, bounds: Bounds, form: Form) -> list[Tensor]:
        given = zip(("dout", "q", "k", "v", "out"), (tensor.contiguous() for tensor in tensors), strict=True)
        deterministic = torch.are_deterministic_algorithms_enabled()
        gradients = _interface_4()._flash_attn_bwd(
            **dict(given), lse=lse, **_arguments_4(bounds, form), deterministic=deterministic
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


def _arguments_2(bounds: Bounds, form: Form) -> dict[str, object]:
    """Those of `_RUNS_2`."""
    how = 0.0, form.scale, form.causal, *_window(form).values(), form.softcap or 0.0, None
    return dict(zip(_RUNS_2, (*bounds, *how), strict=True))


def _arguments_4(bounds: Bounds, form: Form) -> dict[str, object]:
    """Those of `_RUNS_4`; where there is no bound of a window it is None."""
    how = form.scale, form.causal, form.softcap or 0.0, form.reach, None
    return dict(zip(_RUNS_4, (*bounds, *how), strict=True))


def _window(form: Form) -> dict[str, int]:
    """How many keys before and after its own a query sees, -1 for all."""
    return {
        "window_size_left": -1 if form.reach is None else form.reach,
        "window_size_right": 0 if form.causal else -1,
    }


def _is_for_cudnn(query: Tensor, key: Tensor, form: Form) -> bool:
    """Whether cuDNN can do what is asked, and making a plan of it pays."""
    (heads, num_queries, head_dim), num_keys = query.shape[1:], key.size(2)
    if torch.are_deterministic_algorithms_enabled() or (form.borders is not None and len(form.borders) > 2):
        return False
    if num_keys == 1 or (form.causal and num_queries != num_keys):
        return False
    if max(num_queries, num_keys) * heads * head_dim >= _MOST_NUMBERS:
        return False
    comes_again = num_queries % _MULTIPLE == 0 and num_keys % _MULTIPLE == 0
    return comes_again or 4 * heads * head_dim * num_queries * num_keys >= _LONG_CALL


def _tokens_first(*tensors: Tensor) -> list[Tensor]:
    """Views of [1, heads, num_tokens, head_dim] each as [num_tokens, heads, head_dim]."""
    return [tensor[0].transpose(0, 1) for tensor in tensors]


def _bounds(query: Tensor, key: Tensor, form: Form) -> Bounds:
    """The runs of [1, heads, num_queries, head_dim] and [1, kv_heads, num_keys, head_dim]."""
    # FlashAttention-2 bounds a window on its right too, at most all keys after a query's own place, and gives a query
    # whose place lies so far before the first key no key at all: nothing, and an LSE of +inf, which no merge survives.
    # Queries never outnumber keys under a mask: a part's own block holds the part. Blocks before it are pages, which
    # are closed when the next part does not fit, with more than three ChunkSizes in them; of the first page that a
    # window reaches only a rest may be seen, but then by as many queries at most, which are all that reach it.
    assert query.shape[2] <= key.shape[2] or not (form.causal or form.reach is not None), "more queries than keys"
    queries, longest_query = _on(form.borders or (0, query.shape[2]), query.device)
    keys, longest_key = _on(form.borders or (0, key.shape[2]), query.device)
    return queries, keys, longest_query, longest_key


@lru_cache(maxsize=64)
def _on(borders: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Borders on the device, int32 [num_runs + 1], and the longest run: once for all layers of a chunk.

    They are sent, and nobody waits for them.
    """
    if len(borders) == 2:  # one run, as of a page: the device can count that far by itself
        return torch.arange(0, borders[1] + 1, borders[1], dtype=torch.int32, device=device), borders[1]
    longest = max(stop - start for start, stop in pairwise(borders))
    return sent(torch.tensor(borders, dtype=torch.int32), device), longest


@cache
def _no_dropout(device: torch.device) -> Tensor:
    """The state of random numbers that nothing is drawn by. To make it is a kernel, so that it is made once."""
    return torch.zeros(2, dtype=torch.uint64, device=device)
