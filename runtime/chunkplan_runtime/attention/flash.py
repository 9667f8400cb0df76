"""FlashAttention kernels of PyTorch on a CUDA GPU: its FlashAttention-2, and cuDNN's attention.

Called are the operators that `torch.nn.attention.varlen` and `scaled_dot_product_attention` are made of: `varlen_attn`
gives its backward the LSE of its own keys only and has no GQA in torch 2.11.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from chunkplan_runtime.attention.kernel import Form
from chunkplan_runtime.devices import sent

_aten = torch.ops.aten

#: The largest head that FlashAttention-2 has kernels for.
_LARGEST_HEAD = 256

#: Of cuDNN: the largest head that all versions have a backward for, and the first version that is called.
_LARGEST_CUDNN_HEAD = 128
_CUDNN_VERSION = 91_000

#: Lengths that come again are multiples of so many tokens.
_MULTIPLE = 512

#: FLOPs of a forward that a plan of cuDNN is made of whatever its lengths: what each layer gains pays for it.
_LONG_CALL = 2e13

#: Numbers that a tensor with all heads may have.
_MOST_NUMBERS = 2**31


@dataclass(frozen=True)
class Runs:
    """Borders of runs of queries and of keys, int32 on the device, the longest run of each, and bounds of a window.

    `left`, `right`: how many keys before and after its own a query sees, -1 for all.
    """

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    left: int
    right: int

    @property
    def bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """What all FlashAttentions take in this order."""
        return self.queries, self.keys, self.longest_query, self.longest_key


class FlashKernel(ABC):
    """A fused kernel on a GPU that takes tokens first, [num_tokens, heads, head_dim], and borders of runs.

    Deterministic where `torch.use_deterministic_algorithms` asks for it. See `kernel.AttentionKernel`.
    """

    name: str
    squares_only = False

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """Why FlashAttention-2 cannot serve such tensors; None if it can."""
        if device.type != "cuda":
            return f"it runs on a CUDA GPU, not on {device.type}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0"
        head_dim, value_dim = head_dims
        if head_dim != value_dim:
            return f"its values have heads of the size of its keys, not of {value_dim} with {head_dim}"
        return None if head_dim % 8 == 0 and head_dim <= _LARGEST_HEAD else f"it has no kernel for heads of {head_dim}"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """See `kernel.AttentionKernel.forward`."""
        out, lse = self._forward(_tokens_first(query, key, value), _runs_of(query, key, form), form)
        return out.transpose(0, 1)[None], lse[None]

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernel.AttentionKernel.backward`."""
        tensors = _tokens_first(grad_out, query, key, value, out)
        gradients = self._backward(tensors, lse[0].contiguous(), _runs_of(query, key, form), form)
        grad_query, grad_key, grad_value = (each.transpose(0, 1)[None] for each in gradients)
        return grad_query, grad_key, grad_value

    @abstractmethod
    def _forward(self, tensors: list[Tensor], runs: Runs, form: Form) -> tuple[Tensor, Tensor]:
        """Out [num_queries, heads, head_dim] and LSE [heads, num_queries] of query, key and value."""

    @abstractmethod
    def _backward(self, tensors: list[Tensor], lse: Tensor, runs: Runs, form: Form) -> list[Tensor]:
        """Gradients of query, key and value from that of out, these three, and out."""


class TorchCudaKernel(FlashKernel):
    """PyTorch's own FlashAttention-2."""

    name = "torch-cuda"

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """See `kernel.AttentionKernel.why_not`."""
        return "it has no softcap" if form.softcap is not None else super().why_not(device, dtype, head_dims, form)

    def _forward(self, tensors: list[Tensor], runs: Runs, form: Form) -> tuple[Tensor, Tensor]:
        window = {"window_size_left": runs.left, "window_size_right": runs.right}
        out, lse, *_ = _aten._flash_attention_forward(
            *tensors, *runs.bounds, 0.0, form.causal, return_debug_mask=False, scale=form.scale, **window
        )
        return out, lse

    def _backward(self, tensors: list[Tensor], lse: Tensor, runs: Runs, form: Form) -> list[Tensor]:
        window = {"window_size_left": runs.left, "window_size_right": runs.right}
        random = _no_dropout(lse.device), tensors[1].new_empty(0)
        found: list[Tensor] = _aten._flash_attention_backward(
            *tensors, lse, *runs.bounds, 0.0, form.causal, *random, scale=form.scale, **window
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
    squares_only = True  # cuDNN aligns queries and keys at their starts
    _lse_dims = 4  # of the LSE as PyTorch's operators give and take it: [1, heads, num_queries, 1] in torch 2.11

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """See `kernel.AttentionKernel.why_not`."""
        if form.reach is not None:
            return "it has no sliding window"
        if reason := super().why_not(device, dtype, head_dims, form):
            return reason
        if head_dims[0] > _LARGEST_CUDNN_HEAD:
            return f"it has no backward for heads of {head_dims[0]}"
        if torch.cuda.get_device_capability(device) < (9, 0):
            return "it needs compute capability 9.0"
        try:
            version = None if torch.version.hip else torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # there is another one than PyTorch was built for
            return f"cuDNN cannot be called ({str(error).splitlines()[0]})"
        if version is None:
            return "this torch has no cuDNN"
        found, needed = (f"{each // 10_000}.{each // 100 % 100}" for each in (version, _CUDNN_VERSION))
        return None if version >= _CUDNN_VERSION else f"cuDNN {found} is there, needed is {needed} or newer"

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


def _runs_of(query: Tensor, key: Tensor, form: Form) -> Runs:
    """The runs of [1, heads, num_queries, head_dim] and [1, kv_heads, num_keys, head_dim]."""
    queries = form.borders or (0, query.shape[2])
    keys = form.borders or (0, key.shape[2])
    # FlashAttention-2 bounds a window on its right too, at most all keys after a query's own place, and gives a query
    # whose place lies so far before the first key no key at all: nothing, and an LSE of +inf, which no merge survives.
    # Queries never outnumber keys under a mask: a part's own block holds the part. Blocks before it are pages, which
    # are closed when the next part does not fit, with more than three ChunkSizes in them; of the first page that a
    # window reaches only a rest may be seen, but then by as many queries at most, which are all that reach it.
    assert query.shape[2] <= key.shape[2] or not (form.causal or form.reach is not None), "more queries than keys"
    of_queries, longest_query = _on(queries, query.device)
    of_keys, longest_key = (of_queries, longest_query) if keys == queries else _on(keys, query.device)
    left, right = -1 if form.reach is None else form.reach, 0 if form.causal else -1
    return Runs(of_queries, of_keys, longest_query, longest_key, left, right)


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
