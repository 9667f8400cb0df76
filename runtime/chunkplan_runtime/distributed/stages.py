"""Cuts one pipeline stage out of an unmodified transformers model.

A stage is the model itself with the layers of other stages replaced by modules that pass hidden states on, so that its
own layers keep their names and their indices, masks and rotary embeddings are made by the model's own code, and what
is done to a whole model (adapters, activation checkpointing, saving by name) is done to a stage in the same way.

Where a stage has several virtual stages, the one model has the layers of all of them. While one runs, the decoder has
that one's list of layers in place of its own: with the same layers, but for those of the other virtual stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from chunkplan.errors import UsageError
from chunkplan.layers import split_layers as even_layers
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.parts import Cut, decoder_of, layers_of, whole_of
from chunkplan_runtime.models.tiny import returned_by_layers

#: Names of the norm behind the last layer.
_FINAL_NORMS = (
    *("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f", "embedding_norm", "layer_norm"),
    "layernorm",
)


def split_layers(num_layers: int, pp: int, given: Sequence[int] | None = None, virtual_stages: int = 1) -> list[range]:
    """Which layers each model stage has: `given` many, or those that the planner counts with.

    Raises:
        UsageError: there are more stages than layers, or `given` is not what the model has.
    """
    num_stages = pp * virtual_stages
    if num_layers < num_stages and virtual_stages == 1:
        raise UsageError(f"{pp} stages for {num_layers} layers", hint=f"build the plan with at most --pp {num_layers}")
    if num_layers < num_stages:
        raise UsageError(
            f"{pp} stages of {virtual_stages} virtual stages for {num_layers} layers",
            hint="build the plan with fewer --virtual-stages, or less --pp",
        )
    if given is None:
        given = even_layers(num_layers, num_stages)
    if len(given) != num_stages or sum(given) != num_layers or min(given) < 1:
        kind = "stages" if virtual_stages == 1 else "model stages"
        raise UsageError(
            f"--stage-layers is {','.join(map(str, given))}: the model has {num_layers} layers, the plan {num_stages} "
            f"{kind}",
            hint=f"give {num_stages} numbers from 1 that sum to {num_layers}",
        )
    stops = [sum(given[: stage + 1]) for stage in range(num_stages)]
    return [range(stop - count, stop) for stop, count in zip(stops, given, strict=True)]


def cut_stage(model: CausalLM, layers: Sequence[range], layout: RankLayout) -> CausalLM:
    """The stage of `layout` of a model whose model stages have `layers`; what other stages have is dropped from it.

    Tied embeddings stay with the first and with the last model stage.
    """
    whole, decoder, all_layers = model.model, decoder_of(model.model), layers_of(model.model)
    returned = returned_by_layers(model.config)
    own = [layers[model_stage] for model_stage in layout.model_stages()]
    others = _others(whole)
    cuts = tuple(_cut(whole, each, others, returned) for each in own)
    for index in range(len(all_layers)):
        if not any(index in each for each in own):
            all_layers[index] = _Elsewhere(all_layers[index], returned)
    for name in others:
        if all(name in cut.modules for cut in cuts):
            setattr(decoder, name, cuts[0].modules[name])
    if not layout.is_last:
        whole.set_output_embeddings(nn.Identity())
    return replace(model, cuts=cuts)


def _others(whole: Any) -> dict[str, tuple[bool, bool]]:
    """Modules with weights beside the layers of a decoder, by name: whether the first and the last model stage have it.

    Those that lie behind the layers are the last one's, all others the first one's.
    """
    decoder, embeddings, found = decoder_of(whole), whole.get_input_embeddings(), {}
    is_tied = getattr(whole.get_output_embeddings(), "weight", None) is embeddings.weight
    for name, module in decoder.named_children():
        if module is not layers_of(whole) and next(module.parameters(), None) is not None:
            is_norm = name in _FINAL_NORMS
            found[name] = not is_norm, is_norm or (module is embeddings and is_tied)
    return found


def _cut(whole: Any, own: range, others: dict[str, tuple[bool, bool]], returned: int | None) -> Cut:
    """The model stage that has the layers `own` of a model, and of `others` those of its end of it."""
    decoder, all_layers = decoder_of(whole), layers_of(whole)
    is_first, is_last = own.start == 0, own.stop == len(all_layers)
    layers = [layer if index in own else _Elsewhere(layer, returned) for index, layer in enumerate(all_layers)]
    if not is_first:
        layers[0] = _Entry(all_layers[0], returned)
    if not is_last:
        layers[own.stop] = _Exit(all_layers[own.stop], returned)
    own_layers = nn.ModuleList(layers)
    modules: dict[str, nn.Module] = {
        name: own_layers for name, module in decoder.named_children() if module is all_layers
    }
    for name, (of_first, of_last) in others.items():
        if not (is_first and of_first) and not (is_last and of_last):
            module = getattr(decoder, name)
            modules[name] = _NoEmbeddings() if isinstance(module, nn.Embedding) else nn.Identity()
    return Cut(is_first, is_last, own_layers, modules)


def own_head(model: Any) -> Any:
    """The vocabulary head of a process's part of a model that has embeddings of its own beside it, else None."""
    whole = whole_of(model)
    head, embeddings = whole.get_output_embeddings(), whole.get_input_embeddings()
    own, other = getattr(head, "weight", None), getattr(embeddings, "weight", None)
    return None if own is None or other is None or own is other else head


def trains_before_layers(model: Any) -> bool:
    """Whether anything is trained of what makes the inputs of the first layer."""
    children = decoder_of(model).named_children()
    before = [module for name, module in children if module is not layers_of(model) and name not in _FINAL_NORMS]
    return any(weight.requires_grad for module in before for weight in module.parameters())


class _NoEmbeddings(nn.Module):
    """Stands for embeddings that another stage adds."""

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros((), device=tokens.device)


class _Elsewhere(nn.Module):
    """Stands for a layer that another stage has, of which the decoder may ask what kind it is.

    `returned`: of how many values the first is the hidden states, where layers return more than these.
    """

    def __init__(self, layer: nn.Module, returned: int | None = None) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, (str, int)) and not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self._returned = returned

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        hidden = self.passed(hidden_states)
        return hidden if self._returned is None else (hidden, *(None for _ in range(self._returned - 1)))

    def passed(self, hidden_states: Tensor) -> Tensor:
        """What goes on from here."""
        return hidden_states


class _Entry(_Elsewhere):
    """The first layer, where another stage has it: what the code before it made of the inputs is not what they are."""

    chunkplan: Any

    def passed(self, hidden_states: Tensor) -> Tensor:
        inputs: Tensor = self.chunkplan.inputs
        return inputs.clone() if inputs.requires_grad else inputs  # some layers work in place


class _Exit(_Elsewhere):
    """The layer after those of this stage: what it is given is what the next stage gets."""

    chunkplan: Any

    def passed(self, hidden_states: Tensor) -> Tensor:
        self.chunkplan.output = hidden_states
        return hidden_states
