"""A step of an exported order, run by torch's own pipeline runtime in a process of each rank."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.places import section

WIDTH = 3


def layers(num_stages: int) -> list[nn.Module]:
    """A part of a model for every stage, the same in every process."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(num_stages)]


def batch(num_tokens: list[int], chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded micro-batches [n, chunk_size, WIDTH] and targets, of which NaN is padding."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(num_tokens), chunk_size, WIDTH)
    inputs, targets = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    for row, count in enumerate(num_tokens):
        inputs[row, count:] = 0
        targets[row, count:] = float("nan")
    return inputs, targets


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A sum that leaves padding out."""
    there = ~target.isnan()
    return ((output[there] - target[there]) ** 2).sum()


def gradients_of_step(
    rank: int, folder: str, line: str, num_stages: int, num_tokens: list[int], chunk_size: int
) -> Any:
    """Of the stages of this process, by stage: the gradients of all parameters, as the page's own code makes them."""
    [code] = re.findall(r"```python\n(.*?)```", section("integrations.md", "Pipelines of torch"), re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    modules = layers(num_stages)
    inputs, targets = batch(num_tokens, chunk_size)
    names["run_step"](folder, line, modules, inputs, targets, loss_of, torch.device("cpu"))
    dist.barrier()  # else a process that is done first would take its connections from one that still receives
    return {
        stage: [parameter.grad.numpy() for parameter in module.parameters()]
        for stage, module in enumerate(modules)
        if next(module.parameters()).grad is not None
    }
