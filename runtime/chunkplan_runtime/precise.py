"""Makes the norms and rotary embeddings of a model compute in float64.

transformers computes both in float32 whatever the dtype of the model. Rounding to float32 turns a difference in the
last bit of a float64 into one a billion times larger whenever it crosses a rounding border, so that the error of a
comparison would be that of float32 now and then. Chunked and whole execution run the same norms and rotary embeddings;
comparing them in float64 throughout hides nothing of what chunking does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def evaluate_in_float64(model: nn.Module) -> Iterator[None]:
    """Within the block, RMS norms and rotary embeddings of `model` run in float64; weights stay as they are."""
    changed = []
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = partial(_rms_norm, module)
        elif name.endswith("RotaryEmbedding"):
            module.forward = partial(_rotary, module)
        else:
            continue
        changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _rms_norm(module: Any, hidden: Tensor) -> Tensor:
    wide = hidden.double()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    normed: Tensor = module.weight * wide.to(hidden.dtype)
    return normed


@torch.no_grad()
def _rotary(module: Any, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [1, num_tokens, head_dim] of every position and pair of dimensions."""
    angles = position_ids[..., None].double() * module.inv_freq.double()
    angles = torch.cat((angles, angles), dim=-1)
    scale = module.attention_scaling
    return (angles.cos() * scale).to(hidden.dtype), (angles.sin() * scale).to(hidden.dtype)
