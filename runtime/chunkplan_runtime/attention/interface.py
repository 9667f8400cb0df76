"""The attention function that transformers models call under the name "chunkplan".

It knows nothing but causal attention within the spans of a chunk, so whatever else a model asks for is refused: it
would be left out without a word and the gradients would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from chunkplan.errors import UsageError
from chunkplan_runtime.attention.function import ChunkAttention
from chunkplan_runtime.state import ChunkContext

ATTENTION = "chunkplan"

#: Arguments that models pass along and that say nothing about the result: positions are in the rotary embedding.
_IGNORED = {"position_ids", "use_cache"}


def register_attention() -> None:
    """Make "chunkplan" an attention implementation of transformers. Doing so twice changes nothing."""
    AttentionInterface.register(ATTENTION, chunk_attention)
    # Without a mask function of this name, transformers would drop a mask without a word.
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def chunk_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    chunk_context: ChunkContext | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer: query [1, heads, num_tokens, head_dim] -> [1, num_tokens, heads, head_dim].

    Raises:
        UsageError: called outside of the executor, or for something other than plain causal attention.
    """
    if chunk_context is None:
        raise UsageError("attention 'chunkplan' was called without a chunk", hint="run the model through an Executor")
    asked["attention_mask"] = attention_mask
    if asked.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
        asked["is_causal=False"] = True
    refused = sorted(name for name, given in asked.items() if name not in _IGNORED and _is_given(given))
    if refused:
        raise UsageError(
            f"the model asks its attention for {', '.join(refused)}, which chunked execution does not know",
            hint="use a model with plain causal attention",
        )
    if query.shape[0] != 1:
        raise UsageError(f"a chunk is one row, found {query.shape[0]}", hint="run the model through an Executor")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    apply: Callable[..., Tensor] = ChunkAttention.apply
    out = apply(query[0], key[0], value[0], chunk_context, module.layer_idx, scale)
    return out.transpose(0, 1)[None], None


def _is_given(argument: Any) -> bool:
    return argument is not None and (isinstance(argument, Tensor) or bool(argument))


def _no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    if attention_mask is not None:
        raise UsageError("attention 'chunkplan' takes no mask", hint="the plan's segments say who attends to whom")
