"""What is asked of an attention kernel beside its tensors, and how results over several blocks of keys are merged."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Form(NamedTuple):
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

    out [1, heads, num_queries, head_dim] comes back in the dtype of `lse` [1, heads, num_queries].
    """
    share = torch.sigmoid(block_lse - lse)[..., None]  # of the block, [1, heads, num_queries, 1]
    return torch.lerp(out.to(lse.dtype), block_out.to(lse.dtype), share), torch.logaddexp(lse, block_lse)
