"""Rows of embeddings that are looked up, whose gradients are added to a sum.

As a gradient of its own it would be as large as all embeddings, however few tokens a chunk has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chunkplan_runtime.devices import wide


class _Lookup(torch.autograd.Function):
    """`_Lookup.apply(weight, ids, padding)`: rows of a weight with a sum, `models.products.Summed`."""

    @staticmethod
    def forward(ctx: Any, weight: Any, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        with torch._C.DisableTorchFunctionSubclass():
            gradient, (ids,), weight = gradients[0], ctx.saved_tensors, ctx.weight
            if ctx.padding is not None:
                gradient = gradient.masked_fill((ids == ctx.padding)[..., None], 0)
            total = getattr(weight.owner, weight.entry)
            if total is None:
                total = torch.zeros_like(weight, dtype=wide(weight.dtype), requires_grad=False)
                setattr(weight.owner, weight.entry, total)
            total.index_put_((ids,), gradient.to(total.dtype), accumulate=True)  # which is deterministic on a GPU
        return None, None, None


_lookup: Callable[..., Tensor] = super(torch.autograd.Function, _Lookup).apply


def lookup_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What `F.embedding` gives of a summed weight; None where more than rows is asked for."""
    (ids, weight), padding = args[:2], kwargs.get("padding_idx")
    is_plain = not any(kwargs.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse"))
    if not is_plain or weight.owner is None or not weight.requires_grad or not torch.is_grad_enabled():
        return None
    return _lookup(weight, ids, padding)
