"""AdamW over a run's weights, and its state by name for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from chunkplan.errors import DataError
from chunkplan_runtime.training.config import TrainConfig


def make_optimizer(weights: Mapping[str, Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), fused. Norms and biases, which are vectors, do not decay."""
    matrices = [weight for weight in weights.values() if weight.ndim >= 2]
    vectors = [weight for weight in weights.values() if weight.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def optimizer_state(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What it remembers of every weight that it has changed, by `NAME:ENTRY`."""
    return {
        f"{name}:{entry}": value
        for name, weight in weights.items()
        for entry, value in optimizer.state.get(weight, {}).items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], state: Mapping[str, Tensor], where: str
) -> None:
    """Have it remember what `optimizer_state` gave.

    Raises:
        DataError: it is not of these weights.
    """
    for key, value in state.items():
        name, _, entry = key.rpartition(":")
        weight = weights.get(name)
        if weight is None or (value.ndim and value.shape != weight.shape):
            raise DataError(f"no such weight: {name} {tuple(value.shape)}", where=where, hint="remove this checkpoint")
        # A copy: where a tensor that was read from a file lies in memory can change the last bit of a result.
        optimizer.state[weight][entry] = torch.empty_like(value, device=weight.device).copy_(value)
