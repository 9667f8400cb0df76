"""What the fused kernels on a GPU share: layout [tokens, heads, head_dim], borders of runs, what they can take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from chunkplan_runtime.attention.form import Form

#: The largest head that FlashAttention-2 has kernels for.
_LARGEST_HEAD = 256


@dataclass(frozen=True)
class Runs:
    """Borders of runs of queries and of keys, int32 on the device, and the longest run of each."""

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int


def runs_of(query: Tensor, key: Tensor, form: Form) -> Runs:
    """The runs of [heads, num_queries, head_dim] and [kv_heads, num_keys, head_dim]."""
    queries = form.borders or (0, query.shape[1])
    keys = form.borders or (0, key.shape[1])
    return Runs(_on(queries, query.device), _on(keys, query.device), _longest(queries), _longest(keys))


@lru_cache(maxsize=64)
def _on(borders: tuple[int, ...], device: torch.device) -> Tensor:
    """Sent once for all layers of a chunk."""
    return torch.tensor(borders, dtype=torch.int32, device=device)


def _longest(borders: tuple[int, ...]) -> int:
    return max(end - start for start, end in pairwise(borders))


def window_of(form: Form) -> tuple[int, int]:
    """(left, right) as FlashAttention-2 has them: how many keys before and after its own a query sees, -1 for all."""
    return -1 if form.reach is None else form.reach, 0 if form.causal else -1


def why_not_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashAttention-2 cannot serve such tensors; None if it can."""
    if device.type != "cuda":
        return f"it runs on a CUDA GPU, not on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0"
    return None if head_dim % 8 == 0 and head_dim <= _LARGEST_HEAD else f"it has no kernel for heads of {head_dim}"
