"""AdamW over a run's weights, and its state by name for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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
        groups,  # which may be empty, on a stage without anything that is trained
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def optimizer_state(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What an optimizer remembers of every weight that it has changed, by `NAME:ENTRY`."""
    return {
        f"{name}:{entry}": value
        for name, weight in weights.items()
        for entry, value in sorted(optimizer.state.get(weight, {}).items())
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Give an optimizer the state that `optimizer_state` took from another one."""
    for key, value in state.items():
        name, _, entry = key.rpartition(":")
        optimizer.state[weights[name]][entry] = value.to(weights[name].device)
