"""The weights that an optimizer works on: parameters, or fp32 master weights of those in bfloat16.

A bfloat16 weight has 8 bits of precision: most updates are too small to change it, and a gradient that is added up over
many chunks stops growing. Each bfloat16 parameter therefore has an fp32 master weight that the optimizer owns;
gradients are added to the master's as soon as autograd has them, and freed (Micikevicius et al., arXiv 1710.03740),
those of products without being made in bfloat16 before (`models.weight_halves`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from chunkplan_runtime.models.weight_halves import sum_products


class TrainedWeights:
    """The trained weights of a model, by the names they have there.

    `tensors` are leaves for an optimizer: the parameters themselves, with `master_weights` an fp32 one for each in
    bfloat16. Their `.grad` is what backwards add up to. After a change of them `publish` brings it to the model.
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
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))  # type: ignore[no-untyped-call]
                sum_products(parameter, partial(_add_to_gradient, master))
                self._mastered.append((parameter, master))
                self.tensors[name] = master

    @torch.no_grad()
    def publish(self) -> None:
        """Round the fp32 master weights into the model."""
        for parameter, master in self._mastered:
            parameter.copy_(master)


def _move_gradient(master: Tensor, parameter: Tensor) -> None:
    if parameter.grad is None:  # the input half of a backward leaves it to the weight half
        return
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


def _add_to_gradient(master: Tensor, add: Callable[[Tensor | None], Tensor]) -> bool:
    master.grad = add(master.grad)
    return True
