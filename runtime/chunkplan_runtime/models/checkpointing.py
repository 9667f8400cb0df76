"""Activation checkpointing: what is held of a layer for a chunk in flight, and what its backward recomputes.

Every layer of a chunk is a checkpoint of torch; torch's selective checkpoints hold the products of its level, and
`KeptResults` the output of attention. Three products are recomputed at every level: those that expand latents; the
second ones of adapters; and the output of a dense MLP or a shared expert, which no backward reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from transformers.modeling_layers import GradientCheckpointingLayer

from chunkplan.cost.checkpointing import Checkpointing, levels_of
from chunkplan.errors import UsageError
from chunkplan_runtime.attention.context import MIXER, RUN_AGAIN, CurrentChunk, KeptResults
from chunkplan_runtime.kv.host_memory import HostTensors
from chunkplan_runtime.models.parts import decoder_of, layers_of
from chunkplan_runtime.models.recurrent import begin_scan_with

#: Levels at which results of products are held.
_SELECTIVE = ("keep-products", "keep-projections")

#: Products with matrices, by which all linear layers go; and with stacks, of experts and, not held, within recurrences.
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_STACKED = (
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.transformers.grouped_mm_fallback.default,
)

#: Norms behind the MLP, and experts by themselves, whose result is weighted: what these make is read in a backward.
_NORM_BEHIND = re.compile(r"post_?(feedforward|ffw|ffn|mlp)")
_OF_EXPERT = re.compile(r"experts\.\d+\.")


def checkpoint_layers(model: Any, current: CurrentChunk, checkpointing: str) -> None:
    """Set the activation checkpointing of a model's layers (see `levels_of`).

    Raises UsageError where it has no layers that can be run again, or not as many as `checkpointing` is of.
    """
    for module in model.modules():
        own: Any = vars(module).get("forward")
        if getattr(own, "func", None) in (_run_within, _checkpointed):
            module.forward = own.args[-1]
    current.offloaded = frozenset()
    if checkpointing == "none":
        return
    try:
        layers = list(layers_of(model))
    except LookupError:
        layers = [each for each in decoder_of(model).modules() if isinstance(each, GradientCheckpointingLayer)]
    if not layers:
        raise UsageError(
            f"a {model.config.model_type} model has no layers that can be run again in a backward",
            hint="--checkpointing none",
        )
    levels = levels_of(checkpointing, len(layers))
    current.offloaded = frozenset(index for index, level in enumerate(levels) if level == "offload")
    for index, (layer, level) in enumerate(zip(layers, levels, strict=True)):
        if level == "none":
            continue
        if level in _SELECTIVE:
            for module, mark in _marks(layer, model.config.hidden_size):
                module.forward = partial(_run_within, current, mark, module.forward)
        layer.forward = partial(_checkpointed, index, current, level, layer.forward)


def _marks(layer: nn.Module, hidden_size: int) -> Iterator[tuple[Any, str]]:
    """Modules of a layer in which products are held otherwise; those that mix tokens know which layer they are of."""
    mixers: list[str] = []
    for name, module in layer.named_modules():
        if name and hasattr(module, "layer_idx") and not any(name.startswith(f"{mixer}.") for mixer in mixers):
            mixers.append(name)
            yield module, MIXER
        elif re.search(r"\blora_B\.[^.]+$", name):
            yield module, RUN_AGAIN
    if any(_NORM_BEHIND.search(name) for name, _ in layer.named_children()):
        return
    for place, module in layer.named_modules():
        is_last = isinstance(module, nn.Linear) and module.out_features == hidden_size != module.in_features
        if is_last and place.partition(".")[0] not in mixers and not _OF_EXPERT.search(place):
            yield module, RUN_AGAIN


def _run_within(current: CurrentChunk, mark: str, forward: Callable[..., Any], *given: Any, **how: Any) -> Any:
    with current.within(mark):
        return forward(*given, **how)


def _checkpointed(
    index: int, current: CurrentChunk, level: Checkpointing, forward: Callable[..., Any], *given: Any, **how: Any
) -> Any:
    """Run a layer as a checkpoint where there is a graph; again, with the cache rewound to the segment's beginning."""
    context, cache = current.context, current.cache
    if not torch.is_grad_enabled():
        return forward(*given, **how)
    attended = None if level in ("full", "offload") else KeptResults(HostTensors(), is_hidden=level in _SELECTIVE)
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]

    def run(*given: Any, **how: Any) -> Any:
        before = current.context, current.cache
        current.context, current.cache, current.attended = context, cache, attended
        if cache is not None:
            cache.rewind(index)
        here = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        try:
            with ExitStack() as again:
                for mode in modes:
                    if mode not in here:
                        again.enter_context(mode)
                return forward(*given, **how)
        finally:
            current.context, current.cache, current.attended = *before, None
            begin_scan_with(None)
            if attended is not None:
                attended.take()

    contexts: Callable[[], Any] = noop_context_fn
    if level in _SELECTIVE:
        contexts = partial(create_selective_checkpoint_contexts, partial(_policy, current, level))
    # Around the checkpoint hooks of ours get what it saves itself, and its own ones what the layer saves.
    with current.host_inputs.of_layer(given[0]) if level == "offload" and given else nullcontext():
        return checkpoint(run, *given, use_reentrant=False, context_fn=contexts, **how)


def _policy(
    current: CurrentChunk, level: Checkpointing, _: Any, operator: Any, *given: Any, **how: Any
) -> CheckpointPolicy:
    """Decide if the result of an operator is saved; the decision is the same when the layer runs again."""
    held = False
    if RUN_AGAIN not in current.marks:
        mixes = MIXER in current.marks
        if operator in _PRODUCTS:
            held = mixes or level == "keep-products"
        elif operator in _STACKED:
            held = not mixes and level == "keep-products"
    return CheckpointPolicy.MUST_SAVE if held else CheckpointPolicy.PREFER_RECOMPUTE
