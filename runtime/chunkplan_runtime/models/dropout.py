"""Dropout and noise of routers, drawn alike whenever a chunk runs forward, first or again, and on any number of stages.

Every layer draws from a seed of its own, made from the chunk's identity and the layer's index. What it draws then
depends neither on K nor on which layers ran before it in the same process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from chunkplan_runtime.models.parts import layers_of


def mixed_seed(*numbers: int) -> int:
    """A seed for torch, the same for the same numbers, which are from 0."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_layers(model: Any) -> None:
    """Let each layer of a transformers model set its seed before it runs in training.

    One without a list of layers cannot be cut into stages: the seed of the chunk is enough.
    """
    try:
        layers = layers_of(model)
    except LookupError:
        return
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(_set_seed, index))


def _set_seed(index: int, layer: Any, _: Any) -> None:
    context = layer.chunkplan.context
    if context is not None and context.seed is not None and layer.training:
        torch.manual_seed(mixed_seed(context.seed, index))
