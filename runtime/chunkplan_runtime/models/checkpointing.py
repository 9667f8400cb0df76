"""Activation checkpointing: what of a layer a chunk in flight holds, and what its backward runs again.

Every layer of a chunk is a checkpoint of torch, which holds the layer's input and runs the layer again in its backward.
What it gets then from the first time, by torch's selective checkpoints (`create_selective_checkpoint_contexts`), is
what the level says: results of products, of those that mix tokens alone, or of attention alone, which is one operator
(`attention.function`). Nothing of a model's code changes, and what runs again computes the very same numbers. At the
last level the layer's input is in host memory meanwhile (`kv.host_memory`).

Three products are run again at every level, as they take little for what holding them would: those that expand latents
to keys and values (`attention.latents`); the second ones of adapters, of few multiply-adds each; and what a dense MLP
or a shared expert adds to the hidden states as it is, which no backward reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from chunkplan.cost.checkpointing import Checkpointing, levels_of
from chunkplan.errors import UsageError
from chunkplan_runtime.attention.context import Current, KeptResults, Mark
from chunkplan_runtime.attention.function import ATTEND
from chunkplan_runtime.kv.host_memory import HostTensors
from chunkplan_runtime.models.modes import as_now
from chunkplan_runtime.models.parts import decoder_of, layers_of
from chunkplan_runtime.models.recurrent import begin_scan_with

#: Products with matrices, by which all linear layers go.
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

#: Products with stacks of matrices: of experts, and within a recurrence with states, which are not held.
_STACKED = (
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.transformers.grouped_mm_fallback.default,
)

#: Norms behind the MLP: what it makes is read in their backward.
_NORM_BEHIND = re.compile(r"post_?(feedforward|ffw|ffn|mlp)")

#: An expert by itself, whose result is weighted: the weights' backward reads it.
_OF_EXPERT = re.compile(r"experts\.\d+\.")

#: Both contexts of a checkpoint: around a layer, and around it when it runs again.
_Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]


def checkpoint_layers(model: Any, current: Current, checkpointing: str) -> None:
    """Let the layers of a transformers model hold what `checkpointing` says (see `levels_of`), from now on.

    Raises:
        UsageError: the model has no layers that can be run again, or not as many as `checkpointing` is of.
    """
    for module in model.modules():
        own: Any = vars(module).get("forward")
        if getattr(own, "func", None) in (_run_within, _checkpointed):
            module.forward = own.args[-1]
    current.offloaded = frozenset()
    if checkpointing == "none":
        return
    hidden_size, layers = model.config.hidden_size, _layers(model)
    levels = levels_of(checkpointing, len(layers))
    current.offloaded = frozenset(index for index, level in enumerate(levels) if level == "offload")
    for index, (layer, level) in enumerate(zip(layers, levels, strict=True)):
        if level == "none":
            continue
        if level in ("keep-products", "keep-projections"):
            for module, mark in _marks(layer, hidden_size):
                module.forward = partial(_run_within, current, mark, module.forward)
        layer.forward = partial(_checkpointed, index, current, level, layer.forward)


def _layers(model: Any) -> list[nn.Module]:
    try:
        return list(layers_of(model))
    except LookupError:
        found: list[nn.Module] = [
            each for each in decoder_of(model).modules() if isinstance(each, GradientCheckpointingLayer)
        ]
    if not found:
        raise UsageError(
            f"a {model.config.model_type} model has no layers that can be run again in a backward",
            hint="--checkpointing none",
        )
    return found


def _marks(layer: nn.Module, hidden_size: int) -> Iterator[tuple[Any, Mark]]:
    """Modules of a layer within which products are held otherwise than elsewhere.

    Those that mix tokens know which layer they are of; so modules of transformers find their place in a cache.
    """
    mixers: list[str] = []
    for name, module in layer.named_modules():
        if name and hasattr(module, "layer_idx") and not any(name.startswith(f"{mixer}.") for mixer in mixers):
            mixers.append(name)
            yield module, Mark.MIXER
        elif re.search(r"\blora_B\.[^.]+$", name):
            yield module, Mark.RUN_AGAIN
    has_norm_behind = any(_NORM_BEHIND.search(name) for name, _ in layer.named_children())
    for name, child in layer.named_children():
        if has_norm_behind or name in mixers:
            continue
        for place, module in child.named_modules():
            is_last = isinstance(module, nn.Linear) and module.out_features == hidden_size != module.in_features
            if is_last and not _OF_EXPERT.search(place):
                yield module, Mark.RUN_AGAIN


def _run_within(current: Current, mark: Mark, forward: Callable[..., Any], *given: Any, **how: Any) -> Any:
    with current.within(mark):
        return forward(*given, **how)


def _checkpointed(
    index: int, current: Current, level: Checkpointing, forward: Callable[..., Any], *given: Any, **how: Any
) -> Any:
    """Run a layer as a checkpoint, where there is a graph to keep small.

    One that keeps a state runs again with the cache that it ran with, rewound to the state that the segment begins
    with.
    """
    context, cache = current.context, current.cache
    if not torch.is_grad_enabled():
        return forward(*given, **how)
    attended = KeptResults(HostTensors()) if level == "keep-attention" else None

    def run(*given: Any, **how: Any) -> Any:
        before = current.context, current.cache
        current.context, current.cache, current.attended = context, cache, attended
        if cache is not None:
            cache.rewind(index)
        try:
            return forward(*given, **how)
        finally:
            current.context, current.cache, current.attended = *before, None
            begin_scan_with(None)
            if attended is not None:
                attended.take()

    # Around the checkpoint hooks of ours get what it saves itself, and its own ones what the layer saves.
    with current.host_inputs.of_layer(given[0]) if level == "offload" and given else nullcontext():
        return checkpoint(run, *given, use_reentrant=False, context_fn=partial(_contexts, current, level), **how)


def _contexts(current: Current, level: Checkpointing) -> _Contexts:
    computing = as_now()
    if level not in ("keep-products", "keep-projections"):
        return nullcontext(), computing()
    policy = partial(_policy, current, level)
    first, again = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return first, _both(computing(), again)


@contextmanager
def _both(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    with outer, inner:
        yield


def _policy(current: Current, level: Checkpointing, _: Any, operator: Any, *given: Any, **how: Any) -> CheckpointPolicy:
    """Whether what an operator gives is held. It has to say the same when the layer runs again."""
    held = operator is ATTEND
    if not held and Mark.RUN_AGAIN not in current.marks:
        mixes = Mark.MIXER in current.marks
        if operator in _PRODUCTS:
            held = mixes or level == "keep-products"
        elif operator in _STACKED:
            held = not mixes and level == "keep-products"
    return CheckpointPolicy.MUST_SAVE if held else CheckpointPolicy.PREFER_RECOMPUTE
