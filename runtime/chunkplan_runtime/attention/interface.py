"""The attention and mask functions that transformers models call under the name "chunkplan".

What a model asks of its attention is either done or refused by name: left out without a word, gradients would be wrong.
transformers describes a mask by a function that is put together from a few (`masking_utils`). What is made of it is
that description alone, which tokens of its sequence a layer lets a token see: borders of sequences and parts come from
the plan. So windows are those of the model's own code, which not every model takes from its config.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from chunkplan.errors import UsageError
from chunkplan_runtime.attention.context import CurrentChunk
from chunkplan_runtime.attention.function import ChunkAttention, LayerAttention, attend, attention_of
from chunkplan_runtime.attention.heads import HeadExchange
from chunkplan_runtime.attention.kernel import Form
from chunkplan_runtime.attention.latents import latents_of, owner_of
from chunkplan_runtime.devices import wide

ATTENTION = "chunkplan"

#: What a layer asks for: the scale of scores, a sliding window, and a softcap.
How = tuple[float | None, int | None, float | None]

#: Arguments that say nothing about the result, as positions are in the rotary embedding, or that are looked at alone.
_IGNORED = {"position_ids", "use_cache", "output_router_logits", "is_causal"}

#: Functions of `masking_utils` that say nothing new: of borders of sequences, which the plan knows too, and of padding.
#: Chunks have no padding, and where there is one, the model made it itself.
_KNOWN = (
    *("packed_sequence_mask_function", "remap_positions_for_packed_sequence", "and_masks"),
    *("bidirectional_mask_function", "padding_mask_function"),
)

#: True while this thread is in a block of `borders_from_plan`.
_KNOWS_BORDERS: ContextVar[bool] = ContextVar("_KNOWS_BORDERS", default=False)

_FIND = masking_utils.find_packed_sequence_indices


@dataclass(frozen=True)
class Mask:
    """A token sees those before it and itself; with `window` the last so many of them; all, unless it is `causal`.

    `tile`: it sees those in its own tile of the sequence, of so many tokens each. `unknown` is the name of what else
    there is to it, which the layers that get it are refused for.
    """

    window: int | None = None
    causal: bool = True
    tile: int | None = None
    unknown: str | None = None

    def __getitem__(self, kept: tuple[slice | int | None, ...]) -> Mask:
        """Slice the mask as a model does that keeps some rows or columns: all of it if those are all."""
        is_whole = all(each in (slice(None), slice(0, None)) for each in kept)
        return self if is_whole else replace(self, unknown="what keeps a part of it")


#: Where a model gives no mask: a token sees those before it.
_PLAIN = Mask()


masking_utils.find_packed_sequence_indices = lambda position_ids: None if _KNOWS_BORDERS.get() else _FIND(position_ids)


@contextmanager
def borders_from_plan() -> Iterator[None]:
    """Within the block transformers looks for no borders of sequences in positions. Other threads are not concerned.

    To look waits for the device once for each kind of mask, and what it finds plays no part here.
    """
    before = _KNOWS_BORDERS.set(True)
    try:
        yield
    finally:
        _KNOWS_BORDERS.reset(before)


def mask_of(*, mask_function: Callable[..., Any], **_: Any) -> Mask:
    """The mask that a function of transformers describes."""
    window, tile, causal, either = None, None, False, False
    for part in _parts(mask_function):
        name, _, _ = part.__qualname__.partition(".<locals>")
        if name == "or_masks":
            either = True
        elif either and part.__qualname__.endswith("<lambda>"):
            continue  # what it says is asked below
        elif name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":
            window = inspect.getclosurevars(part).nonlocals["sliding_window"]
        elif name == "chunked_overlay":
            tile = inspect.getclosurevars(part).nonlocals["chunk_size"]
        elif name not in _KNOWN:
            return Mask(unknown=name)
    if not either:
        return Mask(window, causal, tile)
    first, second = torch.arange(2)
    # One of two masks, of which one is causal: all see all, or it is not known what.
    return Mask(window, causal=False) if mask_function(0, 0, first, second) else Mask(unknown="or_masks")


def _parts(mask_function: Callable[..., Any]) -> Iterator[Any]:
    """A mask function, and all that it is put together from."""
    yield mask_function
    for enclosed in inspect.getclosurevars(mask_function).nonlocals.values():
        for each in enclosed if isinstance(enclosed, tuple) else (enclosed,):
            if callable(each):
                yield from _parts(each)


def register_attention() -> None:
    """Make "chunkplan" an attention implementation of transformers. Doing so twice changes nothing."""
    AttentionInterface.register(ATTENTION, chunk_attention)
    # Without a mask function of this name, transformers would drop a mask without a word.
    AttentionMaskInterface.register(ATTENTION, mask_of)


def chunk_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer: query [1, heads, num_tokens, head_dim] -> [1, num_tokens, heads, head_dim].

    In a compiler's graph it is one node, if the layer has been prepared for that (`prepare_attention`). Raises
    UsageError outside of the executor, and for something that is not known here, or that no kernel can do.
    """
    how = scaling, sliding_window, softcap
    if torch.compiler.is_compiling():
        mask = _PLAIN if attention_mask is None else attention_mask
        is_plain = isinstance(mask, Mask) and not _refused(module, mask, asked, causal=True)
        if not is_plain or not hasattr(module, "chunkplan_number"):
            given = module, query, key, value, attention_mask, *how, s_aux
            found: tuple[Tensor, None] = _outside_of_graphs(*given, **asked)
            return found
        tensors = *_cast(query, key, value), s_aux, module.chunkplan_number
        return torch.ops.chunkplan.attend_layer(*tensors, *how, mask.window, mask.tile)[0], None
    current: CurrentChunk | None = getattr(module, "chunkplan", None)
    context = None if current is None else current.context
    if current is None or context is None:
        raise UsageError("attention 'chunkplan' was called without a chunk", hint="run the model through an Executor")
    if refused := _refused(module, attention_mask, asked, causal=context.causal):
        raise UsageError(
            f"the model asks its attention for {', '.join(sorted(refused))}, which chunked execution does not know",
            hint="use a model with plain attention",
        )
    if query.size(0) != 1:
        raise UsageError(f"a chunk is one row, found {query.size(0)}", hint="run the model through an Executor")
    of_cache: int | None = getattr(current.cache, "layer", None)
    layer: Any = module.layer_idx if of_cache is None else of_cache
    exchange: HeadExchange | None = None
    if context.shared is not None and len(context.shared.heads) > 1:
        exchange = HeadExchange(context.store.exchanges, context.shared, layer)
    latents, expand = latents_of(module, key, value)
    if exchange is not None or not context.has_parts:
        latents, expand = (), None
    owner = owner_of(layer, key, value) if context.has_parts and expand is None else layer
    if torch._C._is_any_autocast_enabled():
        query, key, value = _cast(query, key, value)
    attention = _layer_attention(current, layer, query, value, attention_mask or _PLAIN, how)
    if owner != layer or expand is not None:
        attention = attention._replace(layer=owner, borrows=owner != layer, expand=expand)
    if exchange is None:
        return attention_of(s_aux, context, attention, query, key, value, *latents, *attention.weights), None
    sink = None if s_aux is None else exchange.own_heads(s_aux)
    of_heads = (each[None] for each in exchange.to_heads(query[0], key[0], value[0]))
    out = attention_of(sink, context, attention, *of_heads)
    return exchange.to_tokens(out[0].transpose(0, 1)).transpose(0, 1)[None], None


#: What it does depends on what the chunk holds, so that a compiler would compile it for every chunk.
_outside_of_graphs: Any = torch.compiler.disable(chunk_attention)  # type: ignore[no-untyped-call]


def _layer_attention(
    current: CurrentChunk, layer: int, query: Tensor, value: Tensor, mask: Mask, how: How
) -> LayerAttention:
    """Make the attention of a layer that has its own keys and values; a window that its mask has not is refused."""
    context, window, (scaling, sliding_window, softcap) = current.context, mask.window, how
    assert context is not None
    if sliding_window not in (None, window):
        raise UsageError(
            f"layer {layer} asks for a sliding window of {sliding_window}, its mask has {window}",
            hint="set sliding_window and layer_types of the config to what the model does",
        )
    head_dims = query.size(-1), value.size(-1)
    scale = head_dims[0] ** -0.5 if scaling is None else scaling
    form = Form(scale, context.causal, reach=window, softcap=softcap)
    kernel = context.kernels.choose(query.device, query.dtype, head_dims, form)
    kept = tuple(filter(None, (current.kept, current.attended)))
    return LayerAttention(kernel, layer, scale, window, softcap, mask.tile, kept=kept)


def _cast(*tensors: Tensor) -> Sequence[Tensor]:
    """Tensors in the dtype of the autocast around, if there is one."""
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return tensors if dtype is None else [each.to(dtype) for each in tensors]


def _refused(module: Any, mask: object, asked: dict[str, object], *, causal: bool) -> list[str]:
    """Arguments that a model passes to attention and that are not supported, where chunks are `causal` or not."""
    found = []
    for name, given in asked.items():  # in every layer of every chunk, so without another call
        if name not in _IGNORED and given is not None and (isinstance(given, Tensor) or given):
            found.append(name)
    if not isinstance(mask, Mask):
        found += [] if mask is None else ["attention_mask"]
    elif mask.unknown:
        found.append(f"a mask by {mask.unknown}")
    if causal and isinstance(mask, Mask) and not mask.causal:
        found.append("a mask that looks ahead")
    if causal and (asked.get("is_causal") is False or not getattr(module, "is_causal", True)):
        found.append("is_causal=False")
    return found


# Attention of a layer as one node of a compiler's graph, which all chunks and all layers alike run. A graph is made of
# tensors, and of numbers that never change. So the node has a tensor with the number of the module that attends, and
# finds by it, when it runs, the chunk that the module is at work on, forward or backward. Graphs that torch keeps on a
# disk are found again by the name of a node: where its arguments change, so must its name.

#: Modules that attend, by number.
_modules: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


def prepare_attention(layer: nn.Module) -> None:
    """Make a layer's attention one node of a compiled graph."""
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            number = next(_numbers)
            _modules[number] = module
            module.chunkplan_number = torch.tensor(number)


@torch.library.custom_op("chunkplan::attend_layer", mutates_args=())
def _attend_layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    number: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    window: int | None,
    tile: int | None,
) -> tuple[Tensor, Tensor]:
    module = _modules[int(number)]
    current: CurrentChunk = module.chunkplan
    mask, how = Mask(window, tile=tile), (scaling, sliding_window, softcap)
    attention = _layer_attention(current, module.layer_idx, query, value, mask, how)
    vars(module)["chunkplan_attention"] = attention  # which is the same for all chunks of a step, for their backwards
    assert current.context is not None
    out, lse = attend(current.context, attention, sink, (query, key, value))
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("chunkplan::attend_layer_backward", mutates_args=())
def _attend_layer_backward(gradient: Tensor, saved: list[Tensor | None]) -> list[Tensor]:
    query, key, value, sink, out, lse, number = saved
    assert out is not None and number is not None
    module = _modules[int(number)]
    tensors = sink, out.transpose(1, 2), lse, query, key, value
    ctx = SimpleNamespace(saved_tensors=tensors, context=module.chunkplan.context, attention=module.chunkplan_attention)
    of_sink, _, _, *of_keys = ChunkAttention.backward(ctx, gradient)
    laid_out = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in of_keys if each is not None]
    return laid_out if of_sink is None else [*laid_out, of_sink]


@_attend_layer.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    return out, query.new_empty(query.shape[:3], dtype=wide(query.dtype))


@_attend_layer_backward.register_fake
def _(gradient: Tensor, saved: Any) -> list[Tensor]:
    found = [each.new_empty(each.transpose(1, 2).shape).transpose(1, 2) for each in saved[:3]]
    return found if saved[3] is None else [*found, torch.empty_like(saved[3])]


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.chunkplan.attend_layer_backward(gradient, ctx.saved_tensors)
    return *found, *[None] * (10 - len(found))


_attend_layer.register_autograd(
    _gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:4], *output, inputs[4])
)
