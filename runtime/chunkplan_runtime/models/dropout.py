"""Dropout and noise of routers, drawn alike whenever a chunk runs forward, first or again, and on any number of stages.

Every layer draws from a seed of its own, made from the chunk's identity and the layer's index. What it draws then
depends neither on K nor on which layers ran before it in the same process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from chunkplan_runtime.models.parts import layers_of

#: How far the seeds of two layers lie apart: steps of the golden ratio.
_APART = 0x9E3779B97F4A7C15


def mixed_seed(*numbers: int) -> int:
    """A seed for torch, the same for the same numbers, which are from 0."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def set_seed(seed: int) -> None:
    """Seed what layers draw from, on the CPU and on GPUs. It is done for every layer: a microsecond.

    `torch.manual_seed` looks for every other kind of device first, which takes a hundred.
    """
    for generator in (torch.default_generator, *torch.cuda.default_generators):
        generator.manual_seed(seed)


def seed_layers(model: Any) -> None:
    """Let each layer of a transformers model set its seed before it runs in training; twice changes nothing.

    One without a list of layers cannot be cut into stages: the seed of the chunk is enough.
    """
    try:
        layers = layers_of(model)
    except LookupError:
        return
    for index, layer in enumerate(layers):
        if getattr(layer.forward, "func", None) is not _seeded:
            layer.forward = partial(_seeded, layer, index, layer.forward)


def _seeded(layer: Any, index: int, forward: Callable[..., Any], *given: Any, **how: Any) -> Any:
    """Run a layer; in the place of its `forward`, as a hook would have torch look for all kinds of them."""
    context = layer.chunkplan.context
    if context is not None and context.seed is not None and layer.training:
        set_seed((context.seed + (index + 1) * _APART) % 2**64)
    return forward(*given, **how)
