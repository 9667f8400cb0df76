"""Gradients of a model that lies on several processes: of tied embeddings, their norm, and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from chunkplan_runtime.distributed.job import Groups
from chunkplan_runtime.models.model import CausalLM

#: Numbers of a gradient that are squared at once: in float64 they take 128 MiB.
NUMBERS_AT_ONCE = 1 << 24


def tied_weight(model: CausalLM, groups: Groups | None) -> str | None:
    """The name of the trained weight that both ends of a pipeline have; None on all other stages and models."""
    if groups is None or groups.ends is None or not model.config.tie_word_embeddings:
        return None
    weight = model.model.get_input_embeddings().weight
    return next(
        (name for name, value in model.model.named_parameters() if value is weight and value.requires_grad), None
    )


def sum_tied_gradients(weights: Mapping[str, Tensor], tied: str | None, groups: Groups | None) -> None:
    """Give both ends of a pipeline the gradient of both uses of a tied weight."""
    if tied is not None and groups is not None:
        weight = weights[tied]
        if weight.grad is None:  # the head's, in a step without targets
            weight.grad = torch.zeros_like(weight)
        [gradient] = local_gradients([weight])
        dist.all_reduce(gradient, group=groups.ends)


def gradient_norm(weights: Mapping[str, Tensor], tied: str | None, groups: Groups | None) -> Tensor:
    """The norm of the gradients of the whole model, that of a tied weight once: the same number on all processes.

    Its sums are float64: of a million float32 squares torch on a CPU loses the fifth digit.
    """
    counted = [weight for name, weight in weights.items() if name != tied or groups is None or groups.layout.is_first]
    device = groups.device if groups is not None else next(iter(weights.values())).device
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in local_gradients(counted):
        for numbers in torch.split(gradient.reshape(-1), NUMBERS_AT_ONCE):
            squares += torch.linalg.vector_norm(numbers, dtype=torch.float64) ** 2
    if groups is not None:
        dist.all_reduce(squares)
    return squares.sqrt()


def clip(weights: Iterable[Tensor], norm: Tensor, largest: float) -> None:
    """Scale gradients whose norm is `norm` down to `largest`, as `torch.nn.utils.clip_grads_with_norm_` does."""
    gradients = local_gradients(weights)
    if gradients:
        torch._foreach_mul_(gradients, torch.clamp(largest / (norm + 1e-6), max=1.0))


def local_gradients(weights: Iterable[Tensor]) -> list[Tensor]:
    """What this process has of the gradients of `weights`, of those that have one."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
