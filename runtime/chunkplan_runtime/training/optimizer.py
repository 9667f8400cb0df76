"""Optimizers by name, with their states, and fp32 master weights of those in bfloat16.

Most updates are too small to change a bfloat16 weight, so an fp32 master weight is updated, to which gradients are
added as soon as autograd has them (Micikevicius et al., arXiv 1710.03740). The moments of `adamw-8bit` (Dettmers et
al., arXiv 2110.02861) are updated by bitsandbytes: `BLOCK` numbers of a row have a scale in common, so that processes
may share the rows. Weights whose rows are no whole blocks, and small ones, have moments in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from chunkplan.cost.optimizers import BLOCK, ELEMENTWISE
from chunkplan.errors import UsageError
from chunkplan.extras import pip_install
from chunkplan_runtime.models.products import sum_gradients
from chunkplan_runtime.training.config import TrainConfig

#: Weights with fewer numbers gain nothing by moments of 8 bits.
_LEAST = 4096


class TrainedWeights:
    """The trained weights of a model, by the names they have there; after a change `publish` brings it to the model.

    `tensors` are leaves for an optimizer: the parameters, or with `master_weights` an fp32 one for each in bfloat16.
    """

    def __init__(self, model: nn.Module, *, master_weights: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._mastered: list[tuple[nn.Parameter, Tensor]] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            self.tensors[name] = parameter
            if master_weights and parameter.dtype == torch.bfloat16:
                master = parameter.detach().float().requires_grad_()
                sum_gradients(parameter, master)
                self._mastered.append((parameter, master))
                self.tensors[name] = master

    @torch.no_grad()
    def publish(self) -> None:
        """Round the fp32 master weights into the model."""
        for parameter, master in self._mastered:
            parameter.copy_(master)


def make_optimizer(weights: Mapping[str, Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that `config` names. Norms and biases, which are vectors, do not decay."""
    name = config.optimizer or "adamw"
    if name not in ELEMENTWISE and any(isinstance(weight, DTensor) for weight in weights.values()):
        raise UsageError(
            f"--optimizer {name} goes by whole rows and columns of a weight, of which each data-parallel process has "
            "some rows",
            hint=f"use --optimizer {' or '.join(ELEMENTWISE)}, or a plan with --dp 1",
        )
    groups: Any = [  # which may be empty, on a stage without anything that is trained
        {"params": [each for each in weights.values() if each.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [each for each in weights.values() if each.ndim < 2], "weight_decay": 0.0},
    ]
    if name == "sgd":  # torch's fused one knows no parts of weights
        return torch.optim.SGD(groups, lr=config.highest_lr)
    if name == "adafactor":  # Shazeer and Stern, arXiv 1804.04235; the rate is a share of a weight's root mean square
        return torch.optim.Adafactor(groups, lr=config.highest_lr)
    options: Any = {"lr": config.highest_lr, "betas": (config.beta1, config.beta2), "eps": config.eps, "fused": True}
    if name == "adamw-8bit":
        return make_adamw_8bit(torch.device(config.device), groups, **options)
    return torch.optim.AdamW(groups, **options)


class _AdamW8bit(torch.optim.AdamW):
    """torch's AdamW of the weights whose moments are float32, and bitsandbytes' of all others."""

    def __init__(self, groups: ParamsT, functional: Any, device: torch.device, **options: Any) -> None:
        super().__init__(groups, **options)
        self._update_blocks = functional.optimizer_update_8bit_blockwise
        #: What the 256 values of a number of 8 bits stand for, of means and of means of squares.
        self._values = [functional.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all weights that have a gradient."""
        done: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and blocks_shape(weight) is not None:
                    self._update(weight, group)
                    done.append((weight, weight.grad))
                    weight.grad = None
        loss = super().step(closure)
        for weight, gradient in done:
            weight.grad = gradient
        return loss

    def _update(self, weight: Tensor, group: Any) -> None:
        state, local, shape = self.state[weight], _local(weight), blocks_shape(weight)
        if not state and shape is not None:
            state["step"] = torch.zeros(())
            for number in (1, 2):  # whatever the codes are, with scales of 0 they stand for 0
                state[f"moment{number}"] = torch.zeros_like(weight, dtype=torch.uint8)
                of_blocks = weight.flatten(1)[:, : shape[1]]  # sharded by rows as the weight is
                state[f"scale{number}"] = torch.zeros_like(of_blocks, dtype=torch.float32)
        state["step"] += 1
        if local.numel():  # a process may have no rows of a weight
            assert weight.grad is not None
            moments = [_local(state[f"moment{number}"]) for number in (1, 2)]
            scales = [_local(state[f"scale{number}"]).view(-1) for number in (1, 2)]
            self._update_blocks(
                *("adam", _local(weight.grad).contiguous(), local, *moments, *group["betas"], 0.0, 0.0),
                *(group["eps"], int(state["step"]), group["lr"], *self._values, *scales),
                weight_decay=group["weight_decay"],
            )


def make_adamw_8bit(device: torch.device, groups: ParamsT, **options: Any) -> torch.optim.Optimizer:
    """AdamW with moments of 8 bits and `options` of torch's, over `groups` of weights on `device`."""
    try:
        functional = import_module("bitsandbytes.functional")
    except ImportError as error:
        raise UsageError(f"--optimizer adamw-8bit needs bitsandbytes ({error})", hint=pip_install("qlora")) from error
    optimizer = _AdamW8bit(groups, functional, device, **options)
    if any(weight.dtype == torch.float64 for group in optimizer.param_groups for weight in group["params"]):
        raise UsageError("bitsandbytes does not compute in float64", hint="use --precision bf16 or fp32")
    tried = torch.zeros(_LEAST // BLOCK, BLOCK, device=device, requires_grad=True)
    tried.grad = torch.zeros_like(tried)
    try:
        _AdamW8bit([tried], functional, device, **options).step()
    except (NotImplementedError, RuntimeError) as error:
        raise UsageError(
            f"bitsandbytes cannot update moments of 8 bits on {device}: {str(error).splitlines()[0]}",
            hint="use --optimizer adamw, or a newer bitsandbytes: on a CPU 0.50.2 does",
        ) from error
    return optimizer


def optimizer_state(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of an optimizer for every weight that it has changed, by `NAME:ENTRY`."""
    return {
        f"{name}:{entry}": value
        for name, weight in weights.items()
        for entry, value in sorted(optimizer.state.get(weight, {}).items())
        if value is not None  # momentum of SGD that has none
    }


def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of an optimizer for every weight by an update that changes none, as the target of loading."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for weight in group["params"]:
            weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def blocks_shape(weight: Tensor) -> tuple[int, int] | None:
    """Rows of a weight, and blocks of each; None where its moments are float32."""
    row = weight.shape[1:].numel()
    has_blocks = weight.ndim >= 2 and weight.numel() >= _LEAST and row % BLOCK == 0
    return (weight.shape[0], row // BLOCK) if has_blocks else None


def _local(tensor: Tensor) -> Tensor:
    """The local shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
