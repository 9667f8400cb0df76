"""FlashAttention: PyTorch's own on a CPU and on a GPU, cuDNN's, and that of the packages flash-attn and flash-attn-4.

Of PyTorch the operators are called that `torch.nn.attention.varlen` and `scaled_dot_product_attention` are made of:
`varlen_attn` gives its backward the LSE of its own keys only and has no GQA in torch 2.11. Of each package two of its
own functions are called, which it promises to nobody: what they take is looked at before they are chosen, and a trial
shows whether they do what they did (`kernels`).
"""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from chunkplan_runtime.attention.kernel import AttentionKernel, Form
from chunkplan_runtime.devices import sent

_aten = torch.ops.aten

#: Of cuDNN: the first version that is called; lengths that come again are multiples of so many tokens; FLOPs of a
#: forward that a plan is made of whatever its lengths; numbers that a tensor with all heads may have.
_CUDNN_VERSION = 91_000
_MULTIPLE = 512
_LONG_CALL = 2e13
_MOST_NUMBERS = 2**31

#: The first version of flash-attn that is called, and the first that is not any more.
_VERSIONS = ((2, 8), (3, 0))

#: Borders of runs of queries and of keys, int32 on the device, and the longest run of each; what packages call them.
Bounds = tuple[Tensor, Tensor, int, int]
_BOUNDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


class TorchCpuKernel(AttentionKernel):
    """PyTorch's fused attention on a CPU, in any float. It aligns queries and keys at their starts."""

    name = "torch-cpu"
    device_type = "cpu"
    one_head_size = squares_only = True
    has_window = has_softcap = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """Implements `kernel.AttentionKernel.forward`."""
        do, runs = _aten._scaled_dot_product_flash_attention_for_cpu, _runs(form, query, key, value)
        out, lse = _joined([do(*run, 0.0, form.causal, scale=form.scale) for run in runs])
        return out, lse

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Implements `kernel.AttentionKernel.backward`.

        In dtypes below float32 the operator would add up the heads of a KV head in them: each has a KV head there.
        """
        group = query.size(1) // key.size(1)
        if is_expanded := group > 1 and query.dtype != lse.dtype:
            key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        do = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        runs = _runs(form, grad_out, query, key, value, out, lse)
        grad_query, *pair = _joined([do(*run, 0.0, form.causal, scale=form.scale) for run in runs])
        if is_expanded:
            pair = [each.view(1, -1, group, *each.shape[2:]).sum(2, dtype=lse.dtype) for each in pair]
        return grad_query, pair[0], pair[1]


class FlashKernel(AttentionKernel):
    """A fused kernel on a GPU that takes tokens first, [num_tokens, heads, head_dim], and borders of runs.

    Deterministic where `torch.use_deterministic_algorithms` asks for it. `capability`: of the oldest GPU it runs on.
    """

    device_type = "cuda"
    one_head_size = True
    capability = (8, 0)
    largest_head = 256

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """Implements `kernel.AttentionKernel.why_not`."""
        if reason := super().why_not(device, dtype, head_dims, form):
            return reason
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
        if torch.cuda.get_device_capability(device) < self.capability:
            return f"it needs compute capability {'.'.join(map(str, self.capability))}"
        fits = head_dims[0] % 8 == 0 and head_dims[0] <= self.largest_head
        return None if fits else f"it has no kernel for heads of {head_dims[0]}"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """Implements `kernel.AttentionKernel.forward`."""
        out, lse = self._forward(_tokens_first(query, key, value), _bounds(query, key, form), form)
        return out.transpose(0, 1)[None], lse[None]

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Implements `kernel.AttentionKernel.backward`."""
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
        """Implements `kernel.AttentionKernel.why_not`."""
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
        """Implements `kernel.AttentionKernel.forward`."""
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
        """Implements `kernel.AttentionKernel.backward`."""
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


class PackagedKernel(FlashKernel):
    """FlashAttention of the `package`, whose `module` gives and takes the LSE. It is imported late: that loads CUDA."""

    package: str
    module: str

    #: The functions that are called, each with the names of what it is given by place, and of what beside `_arguments`.
    calls: tuple[tuple[str, str, str], ...]

    @property
    def version(self) -> str | None:
        """The version of the package; None if it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    def why_not_called(self) -> str | None:
        """The reason why the package cannot be called, if it is installed."""
        try:
            takes = {name: _takes(getattr(self._functions, name)) for name, *_ in self.calls}
        except Exception as error:  # built for another torch, which may show as anything, or a part of it is missing
            return f"{self.package} cannot be imported ({error})"
        for name, by_place, more in self.calls:
            first, found = by_place.split(), takes[name]
            given = {*first, *more.split(), *self._arguments((torch.empty(0), torch.empty(0), 0, 0), Form(1.0, True))}
            needed = {each for each, may_be_left_out in found.items() if not may_be_left_out}
            if [*found][: len(first)] != first or not needed <= given <= found.keys():
                return f"{name} of {self.package} {self.version} takes other things than it is given"
        return None

    def _arguments(self, bounds: Bounds, form: Form) -> dict[str, object]:
        """Keyword arguments of both functions."""
        how = {"softmax_scale": form.scale, "causal": form.causal, "softcap": form.softcap or 0.0}
        return dict(zip(_BOUNDS, bounds, strict=True)) | how

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """Implements `kernel.AttentionKernel.why_not`."""
        if self.version is None:
            return f"the package {self.package} is not installed"
        return super().why_not(device, dtype, head_dims, form) or self.why_not_called()

    @property
    def _functions(self) -> Any:
        return import_module(self.module)


class FlashAttn2Kernel(PackagedKernel):
    """FlashAttention-2 of the package `flash-attn`."""

    name = "flash-attn-2"
    package = "flash-attn"
    module = "flash_attn.flash_attn_interface"
    calls = (
        ("_wrapped_flash_attn_varlen_forward", "q k v", ""),
        ("_wrapped_flash_attn_varlen_backward", "dout q k v out softmax_lse dq dk dv", "deterministic"),
    )

    def why_not_called(self) -> str | None:
        """Implements `PackagedKernel.why_not_called`."""
        numbers = re.match(r"(\d+)\.(\d+)", self.version or "")
        start, stop = (".".join(map(str, each)) for each in _VERSIONS)
        if numbers is None or not _VERSIONS[0] <= (int(numbers[1]), int(numbers[2])) < _VERSIONS[1]:
            return f"flash-attn {self.version} is installed, needed is {start} or newer, below {stop}"
        return super().why_not_called()

    def _forward(self, tensors: list[Tensor], bounds: Bounds, form: Form) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._functions._wrapped_flash_attn_varlen_forward(*tensors, **self._arguments(bounds, form))
        return out, lse

    def _backward(self, tensors: list[Tensor], lse: Tensor, bounds: Bounds, form: Form) -> list[Tensor]:
        given = [tensor.contiguous() for tensor in tensors]
        gradients = [torch.empty_like(tensor) for tensor in given[1:4]]
        deterministic = torch.are_deterministic_algorithms_enabled()
        self._functions._wrapped_flash_attn_varlen_backward(
            *given, lse, *gradients, **self._arguments(bounds, form), deterministic=deterministic
        )
        return gradients

    def _arguments(self, bounds: Bounds, form: Form) -> dict[str, object]:
        return super()._arguments(bounds, form) | _window(form) | {"dropout_p": 0.0, "alibi_slopes": None}


class FlashAttn4Kernel(PackagedKernel):
    """FlashAttention-4 of the package `flash-attn-4`, which compiles its kernels when they are first called."""

    name = "flash-attn-4"
    package = "flash-attn-4"
    module = "flash_attn.cute.interface"
    calls = (("_flash_attn_fwd", "", "q k v return_lse"), ("_flash_attn_bwd", "", "q k v out dout lse deterministic"))
    capability = (9, 0)

    def _forward(self, tensors: list[Tensor], bounds: Bounds, form: Form) -> tuple[Tensor, Tensor]:
        q, k, v = tensors
        out, lse, *_ = self._functions._flash_attn_fwd(q=q, k=k, v=v, **self._arguments(bounds, form), return_lse=True)
        return out, lse

    def _backward(self, tensors: list[Tensor], lse: Tensor, bounds: Bounds, form: Form) -> list[Tensor]:
        given = zip(("dout", "q", "k", "v", "out"), (tensor.contiguous() for tensor in tensors), strict=True)
        deterministic = torch.are_deterministic_algorithms_enabled()
        gradients = self._functions._flash_attn_bwd(
            **dict(given), lse=lse, **self._arguments(bounds, form), deterministic=deterministic
        )
        return list(gradients[:3])

    def _arguments(self, bounds: Bounds, form: Form) -> dict[str, object]:
        """Keyword arguments of both functions; no bound of a window is None."""
        return super()._arguments(bounds, form) | {"window_size_left": form.reach, "window_size_right": None}


def broken_packages() -> dict[str, str]:
    """Reasons why installed packages cannot be called, by the names of their kernels."""
    kernels: tuple[PackagedKernel, ...] = FlashAttn4Kernel(), FlashAttn2Kernel()
    reasons = {kernel.name: kernel.why_not_called() for kernel in kernels if kernel.version is not None}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _takes(function: Any) -> dict[str, bool]:
    """The arguments of a function or an operator, in order, and whether each may be left out."""
    if hasattr(function, "default"):  # an operator
        return {each.name: each.has_default_value() for each in function.default._schema.arguments}
    parameters = inspect.signature(function).parameters.items()
    return {name: each.default is not inspect.Parameter.empty for name, each in parameters}


def _runs(form: Form, *tensors: Tensor) -> Iterable[Sequence[Tensor]]:
    """Split tensors [1, heads, num_tokens, ...] into runs, one for each call."""
    if form.borders is None or len(form.borders) == 2:
        return (tensors,)
    lengths = [stop - start for start, stop in pairwise(form.borders)]
    return zip(*(each.split_with_sizes(lengths, 2) for each in tensors), strict=True)


def _joined(runs: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """Concatenate results of calls for runs of tokens, [1, heads, tokens, ...] each."""
    return runs[0] if len(runs) == 1 else [torch.cat(each, 2) for each in zip(*runs, strict=True)]


def _window(form: Form) -> dict[str, int]:
    """Numbers of keys before and after its own that a query sees, -1 for all."""
    left = -1 if form.reach is None else form.reach
    return {"window_size_left": left, "window_size_right": 0 if form.causal else -1}


def _is_for_cudnn(query: Tensor, key: Tensor, form: Form) -> bool:
    """True if cuDNN supports the request, and making a plan of it pays."""
    (heads, num_queries, head_dim), num_keys = query.shape[1:], key.size(2)
    is_one_run = form.borders is None or len(form.borders) == 2
    fits = num_keys > 1 and max(num_queries, num_keys) * heads * head_dim < _MOST_NUMBERS
    if torch.are_deterministic_algorithms_enabled() or not is_one_run or not fits:
        return False
    if form.causal and num_queries != num_keys:
        return False
    comes_again = num_queries % _MULTIPLE == 0 and num_keys % _MULTIPLE == 0
    return comes_again or 4 * heads * head_dim * num_queries * num_keys >= _LONG_CALL


def _tokens_first(*tensors: Tensor) -> list[Tensor]:
    """Views of [1, heads, num_tokens, head_dim] each as [num_tokens, heads, head_dim]."""
    return [tensor[0].transpose(0, 1) for tensor in tensors]


def _bounds(query: Tensor, key: Tensor, form: Form) -> Bounds:
    """The runs of [1, heads, num_queries, head_dim] and [1, kv_heads, num_keys, head_dim]."""
    # FlashAttention-2 gives a query whose place lies before the first key an LSE of +inf, which no merge survives.
    # Queries never outnumber keys under a mask: a part's own block holds the part. Blocks before it are pages with more
    # than three ChunkSizes; of the first page that a window reaches a rest may be seen, by as many queries at most.
    assert query.shape[2] <= key.shape[2] or not (form.causal or form.reach is not None), "more queries than keys"
    queries, longest_query = _on(form.borders or (0, query.shape[2]), query.device)
    keys, longest_key = _on(form.borders or (0, key.shape[2]), query.device)
    return queries, keys, longest_query, longest_key


@lru_cache(maxsize=64)
def _on(borders: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Borders on the device, int32 [num_runs + 1], and the longest run, once for all layers; nobody waits."""
    if len(borders) == 2:  # one run, as of a page: the device can count that far by itself
        return torch.arange(0, borders[1] + 1, borders[1], dtype=torch.int32, device=device), borders[1]
    longest = max(stop - start for start, stop in pairwise(borders))
    return sent(torch.tensor(borders, dtype=torch.int32), device), longest


@cache
def _no_dropout(device: torch.device) -> Tensor:
    """The state of random numbers that nothing is drawn by, made once: to make it is a kernel."""
    return torch.zeros(2, dtype=torch.uint64, device=device)
