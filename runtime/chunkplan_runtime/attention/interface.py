"""The attention function that transformers models call under the name "chunkplan".

What a model asks of its attention is either done or refused by name: left out without a word, gradients would be wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from chunkplan.errors import UsageError
from chunkplan_runtime.attention.context import Current
from chunkplan_runtime.attention.form import Form
from chunkplan_runtime.attention.function import LayerAttention, attention_of
from chunkplan_runtime.attention.heads import HeadExchange
from chunkplan_runtime.attention.kept import Expand, latents_of, owner_of
from chunkplan_runtime.attention.mask import Mask, mask_of

ATTENTION = "chunkplan"

#: Where a model gives no mask: a token sees those before it.
_PLAIN = Mask()

#: Arguments that models pass along and that say nothing about the result: positions are in the rotary embedding.
_IGNORED = {"position_ids", "use_cache", "output_router_logits"}


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

    In a compiler's graph it is one node (`attention.in_graph`), if the layer has been prepared for that.
    """
    how = scaling, sliding_window, softcap
    if not torch.compiler.is_compiling():
        return _attend(module, query, key, value, attention_mask, how, s_aux, asked)
    mask = _PLAIN if attention_mask is None else attention_mask
    if not hasattr(module, "chunkplan_number") or not _is_plain(module, mask, asked):
        found: tuple[Tensor, None] = _outside_of_graphs(module, query, key, value, attention_mask, how, s_aux, asked)
        return found
    tensors = *_cast(query, key, value), s_aux, module.chunkplan_number
    return torch.ops.chunkplan.attend_of(*tensors, *how, mask.window, mask.tile)[0], None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    how: tuple[float | None, int | None, float | None],
    s_aux: Tensor | None,
    asked: dict[str, object],
) -> tuple[Tensor, None]:
    """`chunk_attention` here and now.

    Raises:
        UsageError: called outside of the executor, or for something that is not known here, or that no kernel can do.
    """
    current: Current | None = getattr(module, "chunkplan", None)
    chunk_context = None if current is None else current.context
    if current is None or chunk_context is None:
        raise UsageError("attention 'chunkplan' was called without a chunk", hint="run the model through an Executor")
    if not isinstance(attention_mask, Mask):
        asked["attention_mask"], attention_mask = attention_mask, _PLAIN
    if attention_mask.unknown:
        asked[f"a mask by {attention_mask.unknown}"] = True
    if chunk_context.causal and not attention_mask.causal:
        asked["a mask that looks ahead"] = True
    is_causal = asked.pop("is_causal", None)
    if chunk_context.causal and (is_causal is False or not getattr(module, "is_causal", True)):
        asked["is_causal=False"] = True
    if refused := [name for name, given in asked.items() if name not in _IGNORED and _is_given(given)]:
        raise UsageError(
            f"the model asks its attention for {', '.join(sorted(refused))}, which chunked execution does not know",
            hint="use a model with plain attention",
        )
    if query.size(0) != 1:
        raise UsageError(f"a chunk is one row, found {query.size(0)}", hint="run the model through an Executor")
    shared, made = chunk_context.shared, current.take_made(key, value)
    shares_heads = shared is not None and len(shared.heads) > 1
    layer: Any = getattr(current.cache, "layer", None)
    if layer is None:
        layer = module.layer_idx
    owner = layer
    latents: tuple[Tensor, ...] = ()
    expand: Expand | None = None
    if chunk_context.has_parts:
        if made is not None and not shares_heads:
            latents, expand = latents_of(module, made)
        if expand is None:
            owner = owner_of(layer, key, value)
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(query.device.type):
        query, key, value = _cast(query, key, value)
    attention = layer_attention(current, layer, query, value, attention_mask.window, attention_mask.tile, *how)
    if owner != layer or expand is not None:
        attention = attention._replace(layer=owner, borrows=owner != layer, expand=expand)
    if shared is None or not shares_heads:
        weights = () if expand is None else expand.weights
        return attention_of(query, key, value, s_aux, chunk_context, attention, *latents, *weights), None
    exchange = HeadExchange(chunk_context.store.exchanges, shared, layer)
    sink = None if s_aux is None else exchange.own_heads(s_aux)
    of_heads = (each[None] for each in exchange.to_heads(query[0], key[0], value[0]))
    out = attention_of(*of_heads, sink, chunk_context, attention)
    return exchange.to_tokens(out[0].transpose(0, 1)).transpose(0, 1)[None], None


#: What it does depends on what the chunk holds, so that a compiler would compile it for every chunk.
_outside_of_graphs: Any = torch.compiler.disable(_attend)  # type: ignore[no-untyped-call]


def layer_attention(
    current: Current,
    layer: int,
    query: Tensor,
    value: Tensor,
    window: int | None,
    tile: int | None,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> LayerAttention:
    """How a layer attends to its own keys and values in the chunk at work; `window` and `tile` are those of its mask.

    Raises:
        UsageError: it asks for a window that its mask has not, or for what no kernel can do.
    """
    chunk_context = current.context
    assert chunk_context is not None
    if sliding_window not in (None, window):
        raise UsageError(
            f"layer {layer} asks for a sliding window of {sliding_window}, its mask has {window}",
            hint="set sliding_window and layer_types of the config to what the model does",
        )
    head_dims = query.size(-1), value.size(-1)
    scale = head_dims[0] ** -0.5 if scaling is None else scaling
    form = Form(scale, chunk_context.causal, reach=window, softcap=softcap)
    kernel = chunk_context.kernels.choose(query.device, query.dtype, head_dims, form)
    return LayerAttention(kernel, layer, scale, window, softcap, tile, attended=current.attended)


def _cast(*tensors: Tensor) -> list[Tensor]:
    """Tensors in the dtype of the autocast around, if there is one."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return [*tensors]
    return [each.to(torch.get_autocast_dtype(device)) for each in tensors]


def _is_plain(module: Any, mask: object, asked: dict[str, object]) -> bool:
    """Whether a token sees those before it in its sequence, and nothing else is asked for."""
    is_causal = asked.get("is_causal") is not False and getattr(module, "is_causal", True)
    if not isinstance(mask, Mask) or not is_causal or not mask.causal or mask.unknown:
        return False
    return not any(_is_given(given) for name, given in asked.items() if name not in (*_IGNORED, "is_causal"))


def _is_given(argument: Any) -> bool:
    return argument is not None and (isinstance(argument, Tensor) or bool(argument))
