"""What is asked of an attention kernel beside its tensors, and how results over several blocks of keys are merged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """Which keys a query sees, and what is done to its scores.

    Queries and keys are aligned at their ends (bottom-right): of `num_queries` and `num_keys`, query i stands at key
    i + num_keys - num_queries. With `causal` it sees no key after that one; with `reach` none that lies more than
    `reach` before it. `borders` (0, ..., num_queries) cuts queries and keys, of which there are as many, into runs that
    do not see each other. `softcap` turns a scaled score s into softcap * tanh(s / softcap).
    """

    scale: float
    causal: bool
    reach: int | None = None
    softcap: float | None = None
    borders: tuple[int, ...] | None = None


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, from attention over those of each (FlashAttention-2, arXiv 2307.08691, 3.1).

    out [heads, num_queries, head_dim] comes back in the dtype of `lse` [heads, num_queries].
    """
    total = torch.logaddexp(lse, block_lse)  # [heads, num_queries]
    merged = out * (lse - total).exp()[..., None] + block_out * (block_lse - total).exp()[..., None]
    return merged.to(lse.dtype), total
