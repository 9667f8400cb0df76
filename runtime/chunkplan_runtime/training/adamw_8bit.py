"""AdamW whose moments have 8 bits (Dettmers et al., arXiv 2110.02861), updated by bitsandbytes.

As many numbers in the order of a weight as `BLOCK` have a scale in common. A block lies within a row, so that any rows
of a weight have blocks of their own: processes that share it, and checkpoints that others read, need no more. Weights
whose rows are no whole blocks, and small ones, keep moments in float32, which torch updates.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from chunkplan.cost.optimizers import BLOCK
from chunkplan.errors import UsageError
from chunkplan.extras import pip_install

#: Smaller weights gain nothing.
_LEAST = 4096


def make_adamw_8bit(device: torch.device, groups: ParamsT, **options: Any) -> torch.optim.Optimizer:
    """AdamW with `options` of torch's over `groups` of weights on `device`.

    Raises:
        UsageError: bitsandbytes is not installed, or does not update such weights there.
    """
    try:
        functional = import_module("bitsandbytes.functional")
    except ImportError as error:
        raise UsageError(f"--optimizer adamw-8bit needs bitsandbytes ({error})", hint=pip_install("qlora")) from error
    optimizer = _AdamW8bit(groups, functional, device, **options)
    if any(weight.dtype == torch.float64 for group in optimizer.param_groups for weight in group["params"]):
        raise UsageError("bitsandbytes does not compute in float64", hint="use --precision bf16 or fp32")
    try:
        optimizer.try_update(device)
    except (NotImplementedError, RuntimeError) as error:
        raise UsageError(
            f"bitsandbytes cannot update moments of 8 bits on {device}: {str(error).splitlines()[0]}",
            hint="use --optimizer adamw, or a newer bitsandbytes: on a CPU 0.50.2 does",
        ) from error
    return optimizer


def blocks_shape(weight: Tensor) -> tuple[int, int] | None:
    """Rows of a weight, and blocks of each; None where its moments are float32."""
    if weight.ndim < 2 or weight.numel() < _LEAST:
        return None
    row = weight.shape[1:].numel()
    return None if row % BLOCK else (weight.shape[0], row // BLOCK)


def sharded_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros, one for each block of `weight`, of which this process has its rows as it has those of `weight`."""
    shape = blocks_shape(weight)
    assert shape is not None
    local = torch.zeros(_local(weight).shape[0], shape[1], dtype=dtype, device=weight.device)
    if not isinstance(weight, DTensor):
        return local
    how: Any = {"run_check": False, "shape": torch.Size(shape), "stride": (shape[1], 1)}
    return DTensor.from_local(local, weight.device_mesh, weight.placements, **how)


class _AdamW8bit(torch.optim.AdamW):
    """torch's AdamW of the weights whose moments are float32, and bitsandbytes' of all others."""

    def __init__(self, groups: ParamsT, functional: Any, device: torch.device, **options: Any) -> None:
        super().__init__(groups, **options)
        self._update_blocks = functional.optimizer_update_8bit_blockwise
        #: What the 256 values of a number of 8 bits stand for, of means and of means of squares.
        self._values = [functional.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]

    def try_update(self, device: torch.device) -> None:
        """Update a block of zeros. Raises what torch or bitsandbytes does where that cannot be."""
        codes = [torch.zeros(1, BLOCK, dtype=torch.uint8, device=device) for _ in range(2)]
        scales = [torch.zeros(1, 1, device=device) for _ in range(2)]
        gradient, weight = (torch.zeros(1, BLOCK, device=device) for _ in range(2))
        self._call(gradient, weight, codes, scales, step=1, group=self.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all weights that have a gradient."""
        done: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and blocks_shape(weight) is not None:
                    self._update(weight, weight.grad, group)
                    done.append((weight, weight.grad))
                    weight.grad = None
        loss = super().step(closure)
        for weight, gradient in done:
            weight.grad = gradient
        return loss

    def _update(self, weight: Tensor, gradient: Tensor, group: Any) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            for place in (1, 2):  # whatever the codes are, with scales of 0 they stand for 0
                state[f"moment{place}"] = torch.zeros_like(weight, dtype=torch.uint8)
                state[f"scale{place}"] = sharded_rows(weight, torch.float32)
        state["step"] += 1
        local = _local(weight)
        if local.numel():  # a process may have no rows of a weight
            codes, scales = ([_local(state[f"{name}{place}"]) for place in (1, 2)] for name in ("moment", "scale"))
            self._call(_local(gradient), local, codes, scales, step=int(state["step"]), group=group)

    def _call(
        self, gradient: Tensor, weight: Tensor, codes: list[Tensor], scales: list[Tensor], *, step: int, group: Any
    ) -> None:
        (beta1, beta2), (of_means, of_squares) = group["betas"], self._values
        first, second = (each.view(-1) for each in scales)
        self._update_blocks(
            *("adam", gradient.contiguous(), weight, *codes),
            *(beta1, beta2, 0.0, 0.0, group["eps"], step, group["lr"]),
            *(of_means, of_squares, first, second),
            weight_decay=group["weight_decay"],
        )


def _local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
