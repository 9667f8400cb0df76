"""How many layers each model stage of a pipeline has."""

from __future__ import annotations


def split_layers(num_layers: int, num_model_stages: int) -> tuple[int, ...]:
    """As even as they come; the last ones, the vocabulary head's among them, have fewer."""
    fewest, rest = divmod(num_layers, num_model_stages)
    return tuple(fewest + (model_stage < rest) for model_stage in range(num_model_stages))
