"""Which models chunked execution is exact for, and why another one is refused.

A model is on the list when nothing in it but attention looks from one token at another, what its attention does is
known here, and rotary embeddings depend on positions alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chunkplan.cost import model_config
from chunkplan.errors import UsageError

MODEL_TYPES = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)

#: `dynamic` and `longrope` choose their frequencies by the longest position of a call, so that a part of a sequence
#: would be rotated otherwise than the whole.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

#: Kinds of layers that the attention function knows.
_LAYER_TYPES = ("full_attention", "sliding_attention")

#: Models whose layers go by `layer_types`.
_WINDOWS_BY_LAYER = ("gemma2", "gemma3_text", "qwen2", "qwen2_moe", "qwen3", "smollm3")

#: Models with the same sliding window in all layers, or in none. What is in neither list has no sliding window at all.
_ONE_WINDOW = ("mistral", "mixtral", "phi3", "qwen3_moe")

#: Sizes of which a model has at least one, or none of its own (head_dim).
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)

#: Entries of a config.json that say what makes a model one that is not on the list.
_FEATURES = {
    "kv_lora_rank": "multi-head latent attention",
    "linear_num_value_heads": "linear-attention layers",
    "mamba_d_state": "state-space layers",
    "vision_config": "images",
}


def check_model_type(document: Mapping[str, Any], where: str) -> None:
    """Refuse a model by its kind, with what is known to stand in the way.

    Raises:
        UsageError: its `model_type` is not one of `MODEL_TYPES`.
    """
    model_type = document["model_type"]
    if model_type in MODEL_TYPES:
        return
    features = [text for name, text in _FEATURES.items() if document.get(name)]
    features += ["attention sinks"] if model_type == "gpt_oss" else []
    why = f" ({', '.join(features)})" if features else ""
    raise UsageError(
        f"model type {model_type!r}{why} is not one that chunked gradients are known to be exact for",
        where=where,
        hint=f"exact for: {', '.join(MODEL_TYPES)}",
    )


def is_bidirectional(config: Any) -> bool:
    """Whether tokens see those that come after them. Only Gemma 3 has an option of its own for it."""
    looks_ahead = config.model_type == "gemma3_text" and bool(config.use_bidirectional_attention)
    return not getattr(config, "is_causal", True) or looks_ahead


def windows(config: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer, in tokens; None for full attention.

    It is that of transformers' masks, which not every model passes on to its attention, whatever else its config says.
    """
    window: int | None = getattr(config, "sliding_window", None)
    if config.model_type in _WINDOWS_BY_LAYER:
        return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)
    return (window if config.model_type in _ONE_WINDOW else None,) * int(config.num_hidden_layers)


def max_positions(config: Any) -> int | None:
    """How many tokens a sequence may have, by the rule that the planner goes by too."""
    return model_config.max_positions(config.to_dict())


def final_softcap(config: Any) -> float | None:
    """What bounds the logits of a model; other types than these have no such thing, whatever their config says."""
    cap: float | None = getattr(config, "final_logit_softcapping", None)
    return cap if config.model_type in ("gemma2", "gemma3_text") else None


def check_config(config: Any, where: str) -> None:
    """Refuse a model that chunked execution would get wrong.

    Raises:
        UsageError: naming what, and what to do about it.
    """
    check_model_type(config.to_dict(), where)
    for name in _SIZES:
        size = getattr(config, name, 1)
        if size is not None and (type(size) is not int or size < 1):
            raise UsageError(f"{name} is {size!r}", where=where, hint="give a whole number from 1")
    for entry in model_config.rope_entries(config.rope_parameters or {}):
        rope_type = entry.get("rope_type")
        if rope_type not in _ROPE_TYPES:
            raise UsageError(
                f"rope type {rope_type!r} depends on more than positions, or is not known",
                where=where,
                hint=f"exact for: {', '.join(_ROPE_TYPES)}; choose one of them for training",
            )
    _check_windows(config, where)
    _check_values(config, where)


def _check_windows(config: Any, where: str) -> None:
    kinds = getattr(config, "layer_types", None) or ()
    unknown = sorted(set(kinds) - set(_LAYER_TYPES))
    if unknown:
        raise UsageError(
            f"layers of kind {', '.join(map(str, unknown))}", where=where, hint=f"known are {', '.join(_LAYER_TYPES)}"
        )
    slides = [window is not None for window in windows(config)]
    if kinds and config.model_type not in _WINDOWS_BY_LAYER:
        if slides != [kind == "sliding_attention" for kind in kinds]:
            every = "its sliding window" if any(slides) else "full attention"
            raise UsageError(
                f"layer_types has {' and '.join(sorted(set(kinds)))}, which a {config.model_type} model of "
                f"transformers does not go by: every layer has {every}",
                where=where,
                hint=f"leave layer_types out if {every} in every layer is what you want",
            )
    elif "sliding_attention" in kinds and config.sliding_window is None:
        raise UsageError(
            "layers with a sliding window, and none is given",
            where=where,
            hint="give sliding_window in tokens (and use_sliding_window: true where the model has it)",
        )
    for window in {*windows(config)} - {None}:
        if type(window) is not int or window < 1:
            raise UsageError(f"sliding_window is {window!r}", where=where, hint="give a whole number from 1, or null")
        if is_bidirectional(config):
            raise UsageError("a sliding window that looks both ways", where=where, hint="use full attention")


def _check_values(config: Any, where: str) -> None:
    if not getattr(config, "return_dict", True):
        raise UsageError("return_dict is false", where=where, hint="leave it out; transformers needs it itself")
    if config.model_type in ("gemma", "gemma2") and config.use_bidirectional_attention:
        raise UsageError(
            "use_bidirectional_attention, of which transformers' own ways to attend make different things",
            where=where,
            hint="leave it out",
        )
    if config.attention_dropout:
        raise UsageError(f"attention_dropout is {config.attention_dropout}", where=where, hint="set it to 0")
    if getattr(config, "output_router_logits", False):
        raise UsageError(
            "output_router_logits asks for a load-balancing loss, which is no sum over chunks",
            where=where,
            hint='set "output_router_logits": false to train without it',
        )
    if getattr(config, "quantization_config", None):
        raise UsageError("the model is quantized", where=where, hint="train from weights that are not quantized")
    padding = getattr(config, "pad_token_id", None)
    if padding is not None and not 0 <= padding < config.vocab_size:
        raise UsageError(
            f"pad_token_id is {padding}, the vocabulary has {config.vocab_size:,}",
            where=where,
            hint="set it to null, or to a token of the vocabulary",
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise UsageError(
            f"{config.num_attention_heads} attention heads cannot share {config.num_key_value_heads} KV heads",
            where=where,
            hint="num_attention_heads has to be a multiple of num_key_value_heads",
        )
