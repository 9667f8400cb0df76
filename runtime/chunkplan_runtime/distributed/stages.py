"""Cuts one pipeline stage out of an unmodified transformers model.

A stage is the model itself with the layers of other stages replaced by modules that pass hidden states on, so that its
own layers keep their names and their indices, masks and rotary embeddings are made by the model's own code, and what
is done to a whole model (adapters, activation checkpointing, saving by name) is done to a stage in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from chunkplan.errors import UsageError
from chunkplan.layers import split_layers as even_layers
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models.model import CausalLM


def split_layers(num_layers: int, pp: int, given: Sequence[int] | None = None) -> list[range]:
    """Which layers each stage has: `given` many, or those that the planner counts with.

    Raises:
        UsageError: there are more stages than layers, or `given` is not what the model has.
    """
    if num_layers < pp:
        raise UsageError(f"{pp} stages for {num_layers} layers", hint=f"build the plan with at most --pp {num_layers}")
    if given is None:
        given = even_layers(num_layers, pp)
    if len(given) != pp or sum(given) != num_layers or min(given) < 1:
        raise UsageError(
            f"--stage-layers is {','.join(map(str, given))}: the model has {num_layers} layers, the plan {pp} stages",
            hint=f"give {pp} numbers from 1 that sum to {num_layers}",
        )
    stops = [sum(given[: stage + 1]) for stage in range(pp)]
    return [range(stop - count, stop) for stop, count in zip(stops, given, strict=True)]


def cut_stage(model: CausalLM, layers: range, layout: RankLayout) -> CausalLM:
    """The stage of `layout` with `layers`; what other stages have is dropped from the model.

    Tied embeddings stay on the first and on the last stage.
    """
    whole = model.model
    decoder = whole.get_decoder()
    for index in range(len(decoder.layers)):
        if index not in layers:
            decoder.layers[index] = _Elsewhere()
    if not layout.is_first and not (layout.is_last and has_tied_embeddings(whole)):
        whole.set_input_embeddings(nn.Identity())
    if not layout.is_last:
        decoder.norm = nn.Identity()
        whole.set_output_embeddings(nn.Identity())
    return replace(model, is_first=layout.is_first, is_last=layout.is_last)


def has_tied_embeddings(model: Any) -> bool:
    """Whether the head of a whole model has the weight of its embeddings."""
    return getattr(model.get_output_embeddings(), "weight", None) is model.get_input_embeddings().weight


class _Elsewhere(nn.Module):
    """Stands for a layer that another stage has."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states
