"""Levels of activation checkpointing: what a chunk in flight holds of each layer, and what its backward runs again."""

from __future__ import annotations

from typing import Literal, get_args

from chunkplan.cost.rates import Again, Rates
from chunkplan.cost.shape import ModelShape

#: What a chunk in flight holds of each layer, from everything to the layer's input alone. Each runs again in the
#: backward what it does not hold: more than those before it.
Checkpointing = Literal["none", "keep-products", "keep-projections", "keep-attention", "full"]
CHECKPOINTINGS: tuple[Checkpointing, ...] = get_args(Checkpointing)


def checkpointing_words(level: str, full: str = "checkpointing") -> list[str]:
    """How a level is named among notes: by itself, or the last one as `full` says; "none" is not named."""
    return [] if level == "none" else [full if level == "full" else level]


def again_of(
    level: Checkpointing, shape: ModelShape, rates: Rates, product: float, ramp: float, copies: float
) -> Again:
    """What a backward runs again of a layer: all of its forward, where its input alone is held.

    Else all but attention; where results of projections are held, of products the MLP and what expands latents; where
    those of all are, the latter alone. All that lies between products runs again at every level.

    Args:
        rates: of a forward.
        product: nanoseconds of a multiply-add.
        ramp, copies: what `rates` has of the ramp of products, and of reading and writing what lies between them.
    """
    if level == "none":
        return Again()
    if level == "full":
        return Again(rates.token, rates.pair, rates.chunk, (1, 1))
    if level == "keep-attention":
        return Again(rates.token, 0.0, rates.chunk, (1, 0))
    run = idle = shape.mean(lambda layer: layer.latent_width * layer.expanded_width)
    if level == "keep-projections":
        mixing = shape.mean(lambda layer: layer.mixer_parameters)
        run, idle = run + shape.active_layer_parameters - mixing, idle + shape.layer_parameters - mixing
    states = shape.mean(lambda layer: layer.state_elements * layer.state_products)
    held_ramp = ramp * max(0.0, 1 - idle / shape.layer_parameters)
    return Again(product * (run + states) + copies, 0.0, rates.chunk - held_ramp, (1, 0))
