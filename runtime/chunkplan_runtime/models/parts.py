"""The parts of a causal LM of transformers: its decoder, layers and head, and a cut of it that runs by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

#: The class that makes causal LMs of configs; its own types promise less than it does.
AUTO_MODEL: Any = AutoModelForCausalLM


def whole_of(model: Any) -> Any:
    """The causal LM itself, of a model that may have adapters of peft around it."""
    return model.get_base_model() if has_adapters(model) else model


def has_adapters(model: Any) -> bool:
    """Whether it has adapters of peft around it."""
    return hasattr(model, "get_base_model")


def decoder_of(model: Any) -> Any:
    """The part of a causal LM that makes hidden states of tokens; of a model without a head the model itself."""
    whole = whole_of(model)
    for decoder in (whole.get_decoder(), whole.base_model):
        if decoder is not whole and isinstance(decoder, PreTrainedModel):
            return decoder
    return next((child for child in whole.children() if isinstance(child, PreTrainedModel)), whole)


def layers_of(model: Any) -> nn.ModuleList:
    """The layers of a causal LM: of the lists of modules that its decoder has, that with the most weights.

    Raises:
        LookupError: it has none.
    """
    lists = [module for module in decoder_of(model).children() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise LookupError("its decoder has no list of layers")
    return max(lists, key=lambda layers: sum(weight.numel() for weight in layers.parameters()))


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Logits [1, num_tokens, vocab_size] of final hidden states [num_tokens, hidden_size], by the model's own code.

    With whatever scaling and softcap that has: its own forward runs with a decoder that gives back hidden states which
    are there already.
    """
    decoder = decoder_of(model)
    own = decoder.__dict__.get("forward")
    decoder.forward = partial(_given, hidden[None])
    try:
        logits: Tensor = whole_of(model)(inputs_embeds=hidden[None], use_cache=False).logits
    finally:
        if own is None:
            del decoder.forward
        else:
            decoder.forward = own
    return logits


class _Given(MoeModelOutputWithPast):
    """What a decoder returned, of which only hidden states are there."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def _given(hidden: Tensor, *_: Any, **__: Any) -> _Given:
    return _Given(last_hidden_state=hidden)


@dataclass(frozen=True)
class Cut:
    """One model stage of a model: only the first embeds tokens, only the last has final hidden states and a head.

    `layers`: its own, and what stands for those of other parts; None: all that the model has. `modules`: what the
    decoder has in place of its own while this runs, by name, the layers among them.
    """

    is_first: bool = True
    is_last: bool = True
    layers: nn.ModuleList | None = None
    modules: Mapping[str, nn.Module] = field(default_factory=dict)

    @contextmanager
    def in_place(self, decoder: Any) -> Iterator[None]:
        """Within the block `decoder` has the modules of this part.

        Otherwise it has those of all parts under their names, for whatever takes the model as a whole: optimizer,
        sharding, saving.
        """
        of_all_parts = {name: getattr(decoder, name) for name in self.modules}
        try:
            for name, module in self.modules.items():
                setattr(decoder, name, module)
            yield
        finally:
            for name, module in of_all_parts.items():
                setattr(decoder, name, module)
