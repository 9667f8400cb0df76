"""Weights that have a shape and take no memory, for a model that is looked at as a whole by a process that has a part.

Unlike weights on torch's meta device they are on the device that they say: what is made beside them, such as adapters,
is made there too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from chunkplan_runtime.models.model import make


def meta_weight(weight: Tensor, shape: torch.Size | None = None) -> nn.Parameter:
    """A weight like another one, or of another `shape`, without numbers of its own, on the CPU."""
    number = torch.zeros((), dtype=weight.dtype).expand(weight.shape if shape is None else shape)
    return nn.Parameter(number, requires_grad=weight.requires_grad)


def replace_weights(model: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Put `make(weight)` in place of every weight of a model; one that modules share stays shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if weight not in made:
                    made[weight] = make(weight)
                module._parameters[name] = made[weight]


def meta_model(config: Any, dtype: torch.dtype) -> Any:
    """A whole transformers model without numbers; what it computes of its config is on torch's meta device.

    Raises:
        DataError: transformers cannot build it.
    """
    model = make(config, dtype, "meta")
    replace_weights(model, meta_weight)
    return model.train()
