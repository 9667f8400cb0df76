"""The weights that an optimizer works on: parameters, or fp32 master weights of those in bfloat16.

A bfloat16 weight has 8 bits of precision: most updates are too small to change it, and a gradient that is added up over
many chunks stops growing. Each bfloat16 parameter therefore has an fp32 master weight that the optimizer owns;
gradients are added to the master's as soon as autograd has them, and freed (Micikevicius et al., arXiv 1710.03740),
those of products without being made in bfloat16 before (`models.products`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chunkplan_runtime.models.products import sum_gradients


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
                sum_gradients(parameter, master)
                self._mastered.append((parameter, master))
                self.tensors[name] = master

    @torch.no_grad()
    def publish(self) -> None:
        """Round the fp32 master weights into the model."""
        for parameter, master in self._mastered:
            parameter.copy_(master)
