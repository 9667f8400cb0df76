"""What the fused kernels on a GPU share: layout [tokens, heads, head_dim], borders of runs, what they can take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from chunkplan_runtime.attention.form import Form
from chunkplan_runtime.devices import sent

#: The largest head that FlashAttention-2 has kernels for.
_LARGEST_HEAD = 256


@dataclass(frozen=True)
class Runs:
    """Borders of runs of queries and of keys, int32 on the device, and the longest run of each."""

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int


def tokens_first(*tensors: Tensor) -> Iterator[Tensor]:
    """Views of [1, heads, num_tokens, head_dim] each as [num_tokens, heads, head_dim]."""
    return (tensor[0].transpose(0, 1) for tensor in tensors)


def heads_first(*tensors: Tensor) -> Iterator[Tensor]:
    """The same back."""
    return (tensor.transpose(0, 1)[None] for tensor in tensors)


def runs_of(query: Tensor, key: Tensor, form: Form) -> Runs:
    """The runs of [1, heads, num_queries, head_dim] and [1, kv_heads, num_keys, head_dim]."""
    queries = form.borders or (0, query.shape[2])
    keys = form.borders or (0, key.shape[2])
    # FlashAttention-2 bounds a window on its right too, at most all keys after a query's own place, and gives a query
    # whose place lies so far before the first key no key at all: nothing, and an LSE of +inf, which no merge survives.
    # Queries never outnumber keys under a mask: a part's own block holds the part. Blocks before it are pages, which
    # are closed when the next part does not fit, with more than three ChunkSizes in them; of the first page that a
    # window reaches only a rest may be seen, but then by as many queries at most, which are all that reach it.
    assert query.shape[2] <= key.shape[2] or not (form.causal or form.reach is not None), "more queries than keys"
    of_queries = _on(queries, query.device)
    of_keys = of_queries if keys == queries else _on(keys, query.device)
    return Runs(of_queries[0], of_keys[0], of_queries[1], of_keys[1])


@lru_cache(maxsize=64)
def _on(borders: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Borders on the device, int32 [num_runs + 1], and the longest run: once for all layers of a chunk.

    They are sent, and nobody waits for them.
    """
    if len(borders) == 2:  # one run, as of a page: the device can count that far by itself
        return torch.arange(0, borders[1] + 1, borders[1], dtype=torch.int32, device=device), borders[1]
    longest = max(stop - start for start, stop in pairwise(borders))
    return sent(torch.tensor(borders, dtype=torch.int32), device), longest


def window_of(form: Form) -> tuple[int, int]:
    """How many keys before and after its own a query sees, -1 for all: `window_size` of FlashAttention-2."""
    return -1 if form.reach is None else form.reach, 0 if form.causal else -1


def why_not_flash(device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> str | None:
    """Why FlashAttention-2 cannot serve such tensors; None if it can. See `kernel.AttentionKernel.why_not`."""
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
