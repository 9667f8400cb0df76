"""Layers that are compiled once, for all chunks and all layers alike (torch.compile), attention as one node in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from chunkplan_runtime.attention.in_graph import prepare_attention
from chunkplan_runtime.models.model import CausalLM

#: Whether one graph is for chunks of all lengths. If not, it is for those of ChunkSize, and others run as they are.
_ALL_LENGTHS = False


def compile_layers(model: CausalLM, chunk_size: int) -> None:
    for part in model.parts:
        for layer in part.own_layers.values():
            prepare_attention(layer)
            seeded: Any = layer.forward
            *given, own = seeded.args
            compiled = torch.compile(own, dynamic=_ALL_LENGTHS, options={"fallback_random": True})
            layer.forward = partial(seeded.func, *given, partial(_run, layer, compiled, own, chunk_size))


def _run(
    layer: Any, compiled: Callable[..., Any], own: Callable[..., Any], chunk_size: int, *given: Any, **how: Any
) -> Any:
    """A layer: compiled, unless modes of torch want to see what it does, or others have a part in the chunk."""
    context = layer.chunkplan.context
    is_alone = context is not None and context.shared is None
    is_seen = is_in_torch_dispatch_mode() or torch._C._len_torch_function_stack() > 0
    if is_alone and not is_seen and (_ALL_LENGTHS or given[0].shape[1] == chunk_size):
        return compiled(*given, **how)
    return own(*given, **how)
