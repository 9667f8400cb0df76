"""What PyTorch's operators of cuDNN do, on a CPU and in any float: what tests of our calls put in their place.

The rules are those of aten/src/ATen/native/cudnn/MHA.cpp and of `check_cudnn_tensor_shapes` beside it. What a GPU would
refuse, or do wrong without a word, is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class CudnnStandIn:
    """Its plans, by what PyTorch finds them by again. Each is for other tensors of one layout too, and does not say so.

    `lse_dims`: how the LSE is given and taken, [1, heads, queries, 1] or [1, heads, queries].
    """

    lse_dims: int = 4
    plans: dict[Any, Any] = field(default_factory=dict)

    def forward(self, asked: dict[str, Any]) -> tuple[Any, ...]:
        """The nine results; only out and the LSE are something where there is no dropout and no border."""
        query, key, value = self._tensors(asked)
        assert asked["compute_log_sumexp"] is True and asked["return_debug_mask"] is False
        scores = _scores(query, key, asked)
        lse = scores.logsumexp(-1)
        out = torch.empty_like(query).copy_((scores - lse[..., None]).exp() @ _heads(value, query))
        given = lse[..., None] if self.lse_dims == 4 else lse
        return out, given, None, None, query.size(2), key.size(2), torch.zeros(()), torch.zeros(()), None

    def backward(self, asked: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients by `out` and `logsumexp` as they are given."""
        query, key, value = self._tensors(asked)
        grad_out, out, lse = (asked[name] for name in ("grad_out", "out", "logsumexp"))
        assert asked["cum_seq_q"] is None and asked["cum_seq_k"] is None
        assert (asked["max_q"], asked["max_k"]) == (query.size(2), key.size(2))
        for name in ("philox_seed", "philox_offset"):  # Blackwell GPUs convert them, used or not
            assert asked[name].dtype == torch.int64 and asked[name].dim() == 0
        assert grad_out.shape == out.shape == query.shape and grad_out.dtype == out.dtype == query.dtype
        assert lse.shape == (*query.shape[:3], 1)[: self.lse_dims] and lse.dtype == _wide(query)
        layouts = [_layout(tensor) for tensor in (grad_out, out, lse)]
        by = tuple(_layout(tensor) for tensor in (query, key, value)), asked["is_causal"], query.dtype
        assert self.plans.setdefault(by, layouts) == layouts, "another layout than that of the plan"
        wide, groups = _wide(query), query.size(1) // key.size(1)
        weights = (_scores(query, key, asked) - lse.reshape(query.shape[:3])[..., None]).exp()
        sent = grad_out.to(wide)
        delta = (sent * out.to(wide)).sum(-1, keepdim=True)
        inner = weights * (sent @ _heads(value, query).mT - delta) * asked["scale"]
        found = inner @ _heads(key, query), inner.mT @ query.to(wide), weights.mT @ sent
        of_keys = (each.unflatten(1, (-1, groups)).sum(2) for each in found[1:])
        grad_query, grad_key, grad_value = (each.to(query.dtype) for each in (found[0], *of_keys))
        return grad_query, grad_key, grad_value

    def _tensors(self, asked: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (asked[name] for name in ("query", "key", "value"))
        assert asked["attn_bias"] is None and asked["dropout_p"] == 0
        assert key.shape == value.shape and key.size(2) > 1 and key.dtype == value.dtype == query.dtype
        assert query.size(1) % key.size(1) == 0 and query.size(3) == key.size(3) and query.size(3) % 8 == 0
        assert all(each.stride(-1) == 1 and each.storage_offset() % 8 == 0 for each in (query, key, value))
        return query, key, value


def _scores(query: Tensor, key: Tensor, asked: dict[str, Any]) -> Tensor:
    """[1, heads, queries, keys]; a mask is aligned at the first key."""
    scores = query.to(_wide(query)) @ _heads(key, query).mT * asked["scale"]
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    return scores.masked_fill(~seen.tril(), -torch.inf) if asked["is_causal"] else scores


def _heads(tensor: Tensor, query: Tensor) -> Tensor:
    """[1, kv_heads, keys, dim] as [1, heads, keys, dim]."""
    return tensor.to(_wide(query)).repeat_interleave(query.size(1) // tensor.size(1), 1)


def _layout(tensor: Tensor) -> Any:
    """Sizes, and strides of what there is more than one of."""
    return tuple((size, size > 1 and stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
