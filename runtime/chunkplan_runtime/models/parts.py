"""The parts of a causal LM of transformers: its decoder, layers and head, cuts that run by themselves, seeds of layers.

Dropout and noise of routers are drawn alike whenever a chunk runs forward, and on any number of stages: every layer
draws from a seed of its own, made from the chunk's identity and the layer's index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from chunkplan.errors import UsageError

#: The class that makes causal LMs of configs; its own types promise less than it does.
AUTO_MODEL: Any = AutoModelForCausalLM

#: How far the seeds of two layers lie apart: steps of the golden ratio.
_APART = 0x9E3779B97F4A7C15


def whole_of(model: Any) -> Any:
    """The causal LM itself, of a model that may have adapters of peft around it."""
    return model.get_base_model() if has_adapters(model) else model


def has_adapters(model: Any) -> bool:
    """True if it has adapters of peft around it."""
    return hasattr(model, "get_base_model")


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Within the block `model` computes without its adapters of peft; raises UsageError where it has none."""
    layers = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    if not layers:
        raise UsageError(
            "the model has no adapters without which it would be the reference",
            hint="put adapters around it (peft.LoraConfig, --lora-rank), or bring those of a reference model: "
            "`chunkplan score --model REFERENCE --plan PLAN --output scores`, then --reference scores",
        )
    for layer in layers:  # not by `enable_adapters`, which also changes what is trained
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def decoder_of(model: Any) -> Any:
    """The part of a causal LM that makes hidden states of tokens; of a model without a head the model itself."""
    whole = whole_of(model)
    for decoder in (whole.get_decoder(), whole.base_model, *whole.children()):
        if decoder is not whole and isinstance(decoder, PreTrainedModel):
            return decoder
    return whole


def layers_of(model: Any) -> nn.ModuleList:
    """The layers of a causal LM: of its decoder's lists of modules that with the most weights; raises LookupError."""
    lists = [module for module in decoder_of(model).children() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise LookupError("its decoder has no list of layers")
    return max(lists, key=lambda layers: sum(weight.numel() for weight in layers.parameters()))


@contextmanager
def _wrapped_forwards(modules: Iterable[Any], wrap: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Within the block each module runs what `wrap` makes of its `forward`."""
    before = [(module, vars(module).get("forward")) for module in modules]
    for module, _ in before:
        module.forward = wrap(module.forward)
    try:
        yield
    finally:
        for module, forward in before:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Logits [1, num_tokens, vocab_size] of final hidden states [num_tokens, hidden_size], by the model's own code."""
    output = _DecoderOutput(last_hidden_state=hidden[None])
    with _wrapped_forwards([decoder_of(model)], lambda _: lambda *_, **__: output):
        logits: Tensor = whole_of(model)(inputs_embeds=hidden[None], use_cache=False).logits
    return logits


class _DecoderOutput(MoeModelOutputWithPast):
    """The output of a decoder, with hidden states alone."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def evaluate_in_float64(model: nn.Module) -> AbstractContextManager[None]:
    """Within the block, what `model` would compute in float32 is computed in float64; weights stay as they are.

    In float32 transformers computes some things whatever the dtype, which now and then makes a difference in the last
    bit a billion times larger. Every module is wrapped: with activation checkpoints, layers run again in a backward.
    """
    return _wrapped_forwards(model.modules(), lambda forward: partial(_in_float64, forward))


def _in_float64(forward: Callable[..., Any], *given: Any, **how: Any) -> Any:
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(isinstance(mode, _Float64) for mode in modes):
        return forward(*given, **how)
    with _Float64():
        return forward(*given, **how)


class _Float64(TorchFunctionMode):
    """Reads float32 as float64 wherever a dtype is asked for."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        function = Tensor.double if function is Tensor.float else function
        args = [torch.float64 if argument is torch.float32 else argument for argument in args]
        kwargs = {name: torch.float64 if given is torch.float32 else given for name, given in (kwargs or {}).items()}
        return function(*args, **kwargs)


@dataclass(frozen=True)
class ModelStage:
    """One model stage of a model: only the first embeds tokens, only the last has final hidden states and a head.

    `layers`: its own, and what stands for others; None: all. `modules`: what the decoder has then in place of its own.
    """

    is_first: bool = True
    is_last: bool = True
    layers: nn.ModuleList | None = None
    modules: Mapping[str, nn.Module] = field(default_factory=dict)

    @contextmanager
    def in_place(self, decoder: Any) -> Iterator[None]:
        """Within the block `decoder` has the modules of this part; else those of all parts, as optimizers see it."""
        of_all_parts = {name: getattr(decoder, name) for name in self.modules}
        try:
            for name, module in self.modules.items():
                setattr(decoder, name, module)
            yield
        finally:
            for name, module in of_all_parts.items():
                setattr(decoder, name, module)


def mixed_seed(*numbers: int) -> int:
    """A seed for torch, the same for the same numbers, which are from 0."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def set_seed(seed: int) -> None:
    """Seed what layers draw from, on the CPU and on GPUs, without the search of `torch.manual_seed` for devices."""
    for generator in (torch.default_generator, *torch.cuda.default_generators):
        generator.manual_seed(seed)


def seed_layers(model: Any) -> None:
    """Hook each layer, if there is a list of them, to set its seed before it runs in training; idempotent."""
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
