"""Attention of a layer as one node of a compiler's graph, which all chunks and all layers alike run.

A graph is made of tensors, and of numbers that never change. So the node has a tensor with the number of the module
that attends, and finds by it, when it runs, the chunk that the module is at work on, forward or backward.
"""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from chunkplan_runtime.attention.context import Current
from chunkplan_runtime.attention.function import ChunkAttention
from chunkplan_runtime.attention.interface import layer_attention
from chunkplan_runtime.devices import wide

#: Modules that attend, by number.
_modules: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()

_library: Any = torch.library.Library("chunkplan", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "attend_of(Tensor query, Tensor key, Tensor value, Tensor? sink, Tensor number, float? scaling, "
    "SymInt? sliding_window, float? softcap, SymInt? window, SymInt? tile) -> (Tensor, Tensor)"
)
_library.define(
    "attend_of_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? sink, Tensor out, Tensor lse, "
    "Tensor number) -> Tensor[]"
)


def prepare_attention(layer: nn.Module) -> None:
    """Let what attends in a layer be one node of a graph."""
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            number = next(_numbers)
            _modules[number] = module
            module.chunkplan_number = torch.tensor(number)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, number: Tensor, *how: Any
) -> tuple[Tensor, Tensor]:
    module = _modules[int(number)]
    current: Current = module.chunkplan
    asked, mask, context = how[:3], how[3:], current.context
    assert context is not None
    attention = layer_attention(current, module.layer_idx, query, value, *mask, *asked)
    vars(module)["chunkplan_attention"] = attention  # which is the same for all chunks of a step, for their backwards
    saved: list[Any] = []
    ctx = SimpleNamespace(save_for_backward=lambda *tensors: saved.extend(tensors))
    out = ChunkAttention.forward(ctx, query, key, value, sink, context, attention)
    return out.contiguous(), saved[5].contiguous()


def _backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *saved: Any) -> list[Tensor]:
    sink, out, lse, number = saved
    module = _modules[int(number)]
    tensors = query, key, value, sink, out.transpose(1, 2), lse
    ctx = SimpleNamespace(saved_tensors=tensors, context=module.chunkplan.context, attention=module.chunkplan_attention)
    found = ChunkAttention.backward(ctx, gradient)
    *of_keys, of_sink = found[:4]
    laid_out = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in of_keys if each is not None]
    return laid_out if of_sink is None else [*laid_out, of_sink]


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    heads, num_tokens = query.shape[1:3]
    out = query.new_empty(1, num_tokens, heads, value.shape[3])
    return out, query.new_empty(1, heads, num_tokens, dtype=wide(query.dtype))


def _fake_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, *_: Any) -> Any:
    found = [each.new_empty(each.transpose(1, 2).shape).transpose(1, 2) for each in (query, key, value)]
    return found if sink is None else [*found, torch.empty_like(sink)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output, inputs[4])


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.chunkplan.attend_of_backward(gradient, *ctx.saved_tensors)
    return *found, *[None] * (10 - len(found))


_library.impl("attend_of", _forward, "CompositeExplicitAutograd")
_library.impl("attend_of_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("chunkplan::attend_of", _fake_forward, lib=_library)
torch.library.register_fake("chunkplan::attend_of_backward", _fake_backward, lib=_library)
torch.library.register_autograd("chunkplan::attend_of", _gradients, setup_context=_keep, lib=_library)
