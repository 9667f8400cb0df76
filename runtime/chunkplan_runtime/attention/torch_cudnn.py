"""cuDNN's attention on a Hopper GPU or a newer one, by the operators behind `scaled_dot_product_attention`.

cuDNN makes a plan of every pair of lengths that a process has not met, which takes it a third of a second or more, once
for forwards and once for backwards. So it is given lengths that come again, as those of whole chunks and pages do, and
calls next to which a plan is nothing. All others are PyTorch's FlashAttention-2: ends of sequences, and sequences side
by side, of which PyTorch to 2.14 makes a plan in every call; one key, which cuDNN refuses; and all where results have
to be the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chunkplan_runtime.attention.form import Form
from chunkplan_runtime.attention.torch_cuda import TorchCudaKernel

_aten = torch.ops.aten

#: Lengths that come again are multiples of so many tokens.
_MULTIPLE = 512

#: FLOPs of a forward that a plan is made of whatever its lengths: what each layer of a model gains pays for it.
_LONG_CALL = 2e13

#: Numbers that a tensor with all heads may have.
_MOST_NUMBERS = 2**31

#: The largest head that all versions have a backward for, and the first version that is called.
_LARGEST_HEAD = 128
_VERSION = 91_000


class TorchCudnnKernel(TorchCudaKernel):
    """See `kernel.AttentionKernel`."""

    name = "torch-cudnn"
    squares_only = True  # cuDNN aligns queries and keys at their starts
    _lse_dims = 4  # of the LSE as PyTorch's operators give and take it: [1, heads, num_queries, 1] in torch 2.11

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """See `kernel.AttentionKernel.why_not`."""
        if form.reach is not None:
            return "it has no sliding window"
        if reason := super().why_not(device, dtype, head_dims, form):
            return reason
        if head_dims[0] > _LARGEST_HEAD:
            return f"it has no backward for heads of {head_dims[0]}"
        if torch.cuda.get_device_capability(device) < (9, 0):
            return "it needs compute capability 9.0"
        try:
            version = None if torch.version.hip else torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # there is another one than PyTorch was built for
            return f"cuDNN cannot be called ({str(error).splitlines()[0]})"
        if version is None:
            return "this torch has no cuDNN"
        found, needed = (f"{each // 10_000}.{each // 100 % 100}" for each in (version, _VERSION))
        return None if version >= _VERSION else f"cuDNN {found} is there, needed is {needed} or newer"

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
