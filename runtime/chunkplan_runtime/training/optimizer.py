"""The optimizers of a run by name, and their states by name for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from chunkplan.cost.optimizers import ELEMENTWISE
from chunkplan.errors import UsageError
from chunkplan_runtime.training.adamw_8bit import blocks_shape, make_adamw_8bit, sharded_rows
from chunkplan_runtime.training.config import TrainConfig


def make_optimizer(weights: Mapping[str, Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that `config` names. Norms and biases, which are vectors, do not decay.

    Raises:
        UsageError: it cannot work on these weights: not on parts of them, or not in this precision or on this device.
    """
    name = config.optimizer or "adamw"
    if name not in ELEMENTWISE and any(isinstance(weight, DTensor) for weight in weights.values()):
        raise UsageError(
            f"--optimizer {name} goes by whole rows and columns of a weight, of which each data-parallel process has "
            "some rows",
            hint=f"use --optimizer {' or '.join(ELEMENTWISE)}, or a plan with --dp 1",
        )
    matrices = [weight for weight in weights.values() if weight.ndim >= 2]
    vectors = [weight for weight in weights.values() if weight.ndim < 2]
    groups = [  # which may be empty, on a stage without anything that is trained
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return _MAKERS[name](groups, config)


def _adamw(
    groups: ParamsT, config: TrainConfig, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> torch.optim.Optimizer:
    """Loshchilov and Hutter, arXiv 1711.05101."""
    return make(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def _adamw_8bit(groups: ParamsT, config: TrainConfig) -> torch.optim.Optimizer:
    return _adamw(groups, config, partial(make_adamw_8bit, torch.device(config.device)))


def _sgd(groups: ParamsT, config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.lr)  # a fused one knows no parts of weights


def _adafactor(groups: ParamsT, config: TrainConfig) -> torch.optim.Optimizer:
    """Shazeer and Stern, arXiv 1804.04235; the rate is a share of a weight's root mean square."""
    return torch.optim.Adafactor(groups, lr=config.lr)


_MAKERS: dict[str, Callable[[ParamsT, TrainConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw-8bit": _adamw_8bit,
    "sgd": _sgd,
    "adafactor": _adafactor,
}


def optimizer_state(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What an optimizer remembers of every weight that it has changed, by `NAME:ENTRY`."""
    return {
        f"{name}:{entry}": value
        for name, weight in weights.items()
        for entry, value in sorted(optimizer.state.get(weight, {}).items())
        if value is not None  # momentum of SGD that has none
    }


def empty_state(weight: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor | None:
    """Room for an entry of `shape` that some optimizer has of `weight`, or of this process's rows; None: none has it.

    That is a number, one for each number of the weight, for each block of them, or for each of its rows or columns.
    """
    if not shape:
        return torch.empty((), dtype=dtype)
    if shape == weight.shape:
        return torch.empty_like(weight, dtype=dtype, requires_grad=False)
    if shape == blocks_shape(weight):
        return sharded_rows(weight, dtype)
    rows_and_columns = [(*weight.shape[:-1], 1), (*weight.shape[:-2], 1, *weight.shape[-1:])]
    if weight.ndim >= 2 and tuple(shape) in rows_and_columns and not isinstance(weight, DTensor):
        return torch.empty(shape, dtype=dtype, device=weight.device)
    return None


def restore_optimizer(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Give an optimizer the state that `optimizer_state` took from another one."""
    for key, value in state.items():
        name, _, entry = key.rpartition(":")
        optimizer.state[weights[name]][entry] = value.to(weights[name].device)
