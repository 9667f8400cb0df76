"""What an attention kernel does, which there are, and which one serves a layer.

Everything above is written against (out, lse) and a backward that takes them as given, because that is what makes
attention over several blocks of keys exact: forward results merge by their LSE, and the backward of a block is right
once it gets the out and lse of all blocks (FlashAttention-2, arXiv 2307.08691, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from chunkplan.cost.attention_rates import AttentionRates
from chunkplan.errors import UsageError
from chunkplan_runtime.attention.flash_attn_2 import FlashAttn2Kernel
from chunkplan_runtime.attention.flash_attn_4 import FlashAttn4Kernel
from chunkplan_runtime.attention.form import Form
from chunkplan_runtime.attention.reference import ReferenceKernel
from chunkplan_runtime.attention.torch_cpu import TorchCpuKernel
from chunkplan_runtime.attention.torch_cuda import TorchCudaKernel
from chunkplan_runtime.attention.torch_cudnn import TorchCudnnKernel
from chunkplan_runtime.attention.trial import why_wrong


class AttentionKernel(Protocol):
    """Attention of queries to keys.

    query is [1, heads, num_queries, head_dim]; key and value are [1, kv_heads, num_keys, head_dim], with any strides;
    query head h belongs to KV head h // (heads // kv_heads). Every query sees at least one key. Values, and with them
    the result, may have heads of another size than queries and keys. Where it takes `squares_only`, there are as many
    queries as keys under a mask.
    """

    name: str
    squares_only: bool

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form) -> str | None:
        """Why it cannot serve such tensors; None if it can. `head_dims`: of queries and keys, and of values."""
        ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """Attend to all keys that `form` lets each query see.

        Returns out [1, heads, num_queries, head_dim] in the dtype of `query`, and lse, the log-sum-exp of the scores,
        [1, heads, num_queries] in at least float32.
        """
        ...

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; `out` and `lse` are those over all the keys the queries attend to."""
        ...


#: By name, the preferred one first.
KERNELS: dict[str, AttentionKernel] = {
    kernel.name: kernel
    for kernel in (
        *(TorchCudnnKernel(), FlashAttn4Kernel(), FlashAttn2Kernel(), TorchCudaKernel()),
        *(TorchCpuKernel(), ReferenceKernel()),
    )
}

AUTO = "auto"

#: Those that no device has a say in. All others are tried where they are to run.
_SURE = ("torch-cpu", "reference")

#: A plan is code that is loaded. CUDA loads it when all is done that the device was given, sends to other stages too.
_PLANS = "it makes plans in a step, for which one of several stages might wait for ever"


class Kernels:
    """The kernels a model runs with: the one that was named, or for each layer the first that can serve it.

    `rates`: of the device, in the order of which those kernels come that it has. `has_links`: whether stages wait for
    each other. `left_out`: why kernels that could serve a layer are not right on its device, or there, by name.
    """

    def __init__(self, name: str = AUTO, rates: Iterable[AttentionRates] = (), *, has_links: bool = False) -> None:
        if name != AUTO and name not in KERNELS:
            raise UsageError(
                f"there is no attention kernel {name!r}", hint=f"choose one of: {', '.join((AUTO, *KERNELS))}"
            )
        self._candidates = _fastest_first(rates) if name == AUTO else [KERNELS[name]]
        self._has_links = has_links
        self.left_out: dict[str, str] = {}
        self._chosen: dict[tuple[torch.device, torch.dtype, tuple[int, int], bool, bool], AttentionKernel] = {}

    def choose(
        self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form
    ) -> AttentionKernel:
        """The kernel for a layer; `head_dims`: of queries and keys, and of values.

        Raises:
            UsageError: none of them can serve it, with the reason of each.
        """
        case = device, dtype, head_dims, form.reach is not None, form.softcap is not None
        if case not in self._chosen:
            refusals: list[str] = []
            kernel = next(self.serving(device, dtype, head_dims, form, refusals), None)
            if kernel is None:
                raise UsageError(
                    f"no attention kernel can run this model ({'; '.join(refusals)})", hint="--attention auto"
                )
            self._chosen[case] = kernel
        return self._chosen[case]

    def serving(
        self, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], form: Form, refusals: list[str]
    ) -> Iterator[AttentionKernel]:
        """All that can serve a layer, one after another; `refusals` gets the reasons of the others."""
        for kernel in self._candidates:
            reason = kernel.why_not(device, dtype, head_dims, form)
            if reason is None and kernel.name not in _SURE:
                plans = self._has_links and kernel.name == TorchCudnnKernel.name
                reason = _PLANS if plans else why_wrong(kernel, device, dtype, head_dims, form)
                if reason is not None:
                    self.left_out[kernel.name] = reason
            if reason is None:
                yield kernel
            else:
                refusals.append(f"{kernel.name}: {reason}")


def _fastest_first(rates: Iterable[AttentionRates]) -> list[AttentionKernel]:
    """All kernels, the preferred one first, but those that there are rates of by these, in each other's places."""
    known: dict[str, float] = {}
    for each in rates:
        known.setdefault(each.kernel, each.both_blocks)
    ranked = iter(sorted(known, key=known.__getitem__, reverse=True))
    return [KERNELS[next(ranked) if name in known else name] for name in KERNELS]
