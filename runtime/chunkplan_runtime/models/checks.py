"""Checks of a model's config: refuses models that chunked execution does not support, before anything is built.

Exactness of gradients is measured (`proof`). The refusals here are of problems that no small model would show: those
that depend on the data, on the length of sequences, or on other settings of a training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from chunkplan.cost import model_config
from chunkplan.errors import UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan
from chunkplan_runtime.feed.stream import PlanStream
from chunkplan_runtime.layout import used_blocks
from chunkplan_runtime.models.recurrent import is_recurrent

#: Types whose layers go by `layer_types`, and those with one sliding window in all layers, or none, whatever that says.
_WINDOWS_BY_LAYER = ("gemma2", "gemma3_text", "qwen2", "qwen2_moe", "qwen3", "smollm3")
_ONE_WINDOW = ("mistral", "mixtral", "phi3", "qwen3_moe")

#: Types whose every feature is known, and held by tests of this project: of others a small model is run (`proof`).
MODEL_TYPES = tuple(sorted((*_WINDOWS_BY_LAYER, *_ONE_WINDOW, "gemma", "llama", "olmo2")))

#: These choose their frequencies by the longest position of a call, so that a part would be rotated otherwise.
_LENGTH_ROPE_TYPES = ("dynamic", "longrope")

#: Kinds of rotary embeddings, and of layers, that the types above may have.
_ROPE_TYPES, _LAYER_TYPES = ("default", "linear", "llama3", "yarn"), ("full_attention", "sliding_attention")

#: How many experts there are, by what configs call it; and to how many of them a token goes.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")

#: Sizes of which a model has at least one, or none of its own (head_dim).
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)


def is_bidirectional(config: Any) -> bool:
    """True if tokens see those that come after them. Only Gemma 3 has an option of its own for it."""
    looks_ahead = config.model_type == "gemma3_text" and bool(config.use_bidirectional_attention)
    return not getattr(config, "is_causal", True) or looks_ahead


def entry_of(config: Any, name: str, default: Any = None) -> Any:
    """The entry of a config under a name; the largest where its layers have different sizes."""
    try:
        return getattr(config, name, default)
    except RuntimeError:  # transformers refuses to say one for all layers
        return max(getattr(config.per_layer_config[layer], name) for layer in range(config.num_hidden_layers))


def windows(config: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer by its config, in tokens; None for full attention. The mask decides."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if config.model_type in MODEL_TYPES and config.model_type not in _WINDOWS_BY_LAYER:
        kinds, window = None, window if config.model_type in _ONE_WINDOW else None  # whatever their config says
    if kinds is None:
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def kv_shapes(config: Any, layer: int | None = None) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes (heads, dim) of a token's key and value in a layer; without `layer`, the largest of all."""
    by_layer = None if layer is None else getattr(config, "per_layer_config", None)
    if by_layer is not None:
        config = by_layer[layer]
    if getattr(config, "kv_lora_rank", None):  # multi-head latent attention, expanded
        key_dim, value_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        return (config.num_attention_heads, key_dim), (config.num_attention_heads, value_dim)
    num_heads: int = entry_of(config, "num_attention_heads") or 1
    heads: int = entry_of(config, "num_key_value_heads") or num_heads
    dim: int = entry_of(config, "head_dim") or config.hidden_size // num_heads
    return (heads, dim), (heads, dim)


def attention_shape(config: Any, layer: int) -> tuple[int, int]:
    """The shape of a token's result of attention in a layer: (heads, dim)."""
    by_layer = getattr(config, "per_layer_config", None)
    heads: int = entry_of(config if by_layer is None else by_layer[layer], "num_attention_heads") or 1
    return heads, kv_shapes(config, layer)[1][1]


def max_positions(config: Any) -> int | None:
    """The largest number of tokens of a sequence, by the same rule as the planner's."""
    return model_config.max_positions(config.to_dict())


def check_config(config: Any, where: str, *, router_loss: bool = False) -> None:
    """Refuse a model that chunked execution would get wrong, with a UsageError.

    `router_loss`: the load-balancing loss that its config may ask for is seen to elsewhere (`router_loss`).
    """
    for what, hint in _problems(config):
        raise UsageError(what, where=where, hint=hint)
    if getattr(config, "output_router_logits", False) and not router_loss:
        raise UsageError(
            "output_router_logits asks for a load-balancing loss, which is no sum over chunks",
            where=where,
            hint="train with chunkplan_runtime.train or ChunkTrainer, which add it, or set it to false to go without",
        )


def _problems(config: Any) -> Iterator[tuple[str, str]]:
    """Problems of a config, each with a hint."""
    text = config.get_text_config(decoder=True)
    if text.model_type != config.model_type:
        hint = f"train its language model, of type {text.model_type}: `python -m chunkplan_runtime.train` takes that"
        yield f"a {config.model_type} model is one of text and more", hint
    if text is not config or getattr(config, "is_encoder_decoder", False):
        yield f"a {config.model_type} model has an encoder", "take one of decoders only"
    rope = getattr(config, "rope_parameters", None)
    for rope_type in [entry.get("rope_type") for entry in model_config.rope_entries(rope)] if rope else ():
        if rope_type in _LENGTH_ROPE_TYPES or (config.model_type in MODEL_TYPES and rope_type not in _ROPE_TYPES):
            hint = f"exact for: {', '.join(_ROPE_TYPES)}; choose one of them for training"
            yield f"rope type {rope_type!r} depends on more than positions, or is not known", hint
    if not getattr(config, "return_dict", True):
        yield "return_dict is false", "leave it out; transformers needs it itself"
    if config.model_type in ("gemma", "gemma2") and config.use_bidirectional_attention:
        yield "use_bidirectional_attention, of which transformers has several readings", "leave it out"
    for name in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"):
        if getattr(config, name, None):
            yield f"{name} is {getattr(config, name)}", "set it to 0"
    if getattr(config, "quantization_config", None):
        yield "the model is quantized", "train from weights that are not quantized"
    for name in _SIZES:
        size = entry_of(config, name)
        if type(size) is int and size < 1:
            yield f"{name} is {size}", "give a whole number from 1"
    padding = getattr(config, "pad_token_id", None)
    if padding is not None and not 0 <= padding < config.vocab_size:
        hint = "set it to null, or to a token of the vocabulary"
        yield f"pad_token_id is {padding}, the vocabulary has {config.vocab_size:,}", hint
    heads, kv_heads = (entry_of(config, name) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads and kv_heads and heads % kv_heads:
        hint = "num_attention_heads has to be a multiple of num_key_value_heads"
        yield f"{heads} attention heads cannot share {kv_heads} KV heads", hint
    if config.model_type not in MODEL_TYPES:
        return
    kinds = getattr(config, "layer_types", None) or ()
    if unknown := sorted(set(kinds) - set(_LAYER_TYPES)):
        yield f"layers of kind {', '.join(map(str, unknown))}", f"known are {', '.join(_LAYER_TYPES)}"
    slides = [window is not None for window in windows(config)]
    if kinds and config.model_type not in _WINDOWS_BY_LAYER:
        if slides != [kind == "sliding_attention" for kind in kinds]:
            every = "its sliding window" if any(slides) else "full attention"
            yield (
                f"layer_types has {' and '.join(sorted(set(kinds)))}, which a {config.model_type} model of "
                f"transformers does not go by: every layer has {every}",
                f"leave layer_types out if {every} in every layer is what you want",
            )
    elif "sliding_attention" in kinds and config.sliding_window is None:
        hint = "give sliding_window in tokens (and use_sliding_window: true where the model has it)"
        yield "layers with a sliding window, and none is given", hint
    for window in {*windows(config)} - {None}:
        if type(window) is not int or window < 1:
            yield f"sliding_window is {window!r}", "give a whole number from 1, or null"
        if is_bidirectional(config):
            yield "a sliding window that looks both ways", "use full attention"


def has_experts(model: nn.Module, config: Any) -> bool:
    """True if layers of a model of this config may have experts: the config names some, or weights are called so."""
    named = all(any(getattr(config, name, None) for name in names) for names in (NUM_EXPERTS, EXPERTS_PER_TOKEN))
    return named or any(".experts." in name for name, _ in model.named_parameters())


def share_of_tokens(config: Any, name: str, weight: nn.Parameter, module: nn.Module) -> float:
    """The share of tokens that meet a weight of `module`: all, or of experts, in a stack or each by itself, some."""
    layer = re.search(r"\.(\d+)\.", name)
    sizes = []
    for names in (NUM_EXPERTS, EXPERTS_PER_TOKEN):
        values = [getattr(config, each, None) for each in names]  # of some models an entry a layer
        values = [each[int(layer[1])] if isinstance(each, (list, tuple)) and layer else each for each in values]
        sizes.append(next((each for each in values if type(each) is int and each > 0), 0))
    num_experts, chosen = sizes
    is_stack = weight.ndim == 3 and not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    if is_stack and (weight.shape[0] == num_experts or ".experts." in name):
        num_experts = min(num_experts, 1) * weight.shape[0]
    elif not re.search(r"\bexperts\.\d+\.", name):
        return 1.0
    return min(chosen / num_experts, 1.0) if num_experts and chosen else 1.0


def check_plan(config: Any, plan: Plan, router_loss: str | None = None) -> None:
    """Refuse a plan that a model of this transformers config cannot be run with, with a UsageError.

    `router_loss`: what its load-balancing loss is over, if it has one.
    """
    where, alone = str(plan.path), "build the plan with `--cp off`"
    shared = [block.heads for block in used_blocks(plan)]
    if shared and is_recurrent(config):
        what = f"processes cannot share sequences of a {config.model_type} model, whose layers keep a state"
        raise UsageError(what, where=where, hint=alone)
    if shared and router_loss == "sequence":
        what = "with --router-loss sequence processes cannot share sequences, of which none would count a whole one"
        raise UsageError(what, where=where, hint=f"{alone}, or train with `--router-loss batch`")
    (kv_heads, _), _ = kv_shapes(config)
    for name, heads in (("key and value heads", kv_heads), ("heads", getattr(config, "num_attention_heads", kv_heads))):
        if uneven := [num for num in shared if heads % num]:
            what = f"{uneven[0]} processes cannot share the model's {heads} {name} evenly"
            raise UsageError(what, where=where, hint="build the plan with the --model of this model")
    if plan.config.share_prefixes:
        check_prefixes(config, router_loss, "build the plan without --share-prefixes", where)
    groups = plan.chunks().column("group_id") if is_bidirectional(config) else None
    if groups is not None and groups.null_count < len(groups):
        what = "the plan splits sequences, and in this model tokens see those that come after them"
        hint = "build the plan with `--no-split`, and a --chunk-size of the longest sequence"
        raise UsageError(what, where=where, hint=hint)


def check_prefixes(config: Any, router_loss: str | None, hint: str, where: str | None = None) -> None:
    """Refuse a model of this transformers config whose sequences cannot share prefixes, with a UsageError."""
    kinds = {
        "layers keep a state or count the tokens before": is_recurrent(config),
        "tokens see those that come after them": is_bidirectional(config),
        "routers have a load-balancing loss": router_loss not in (None, "none"),
    }
    for what in (what for what, has_it in kinds.items() if has_it):
        message = f"sequences cannot share prefixes in a {config.model_type} model whose {what}"
        hint += " or train with `--router-loss none`" if what.startswith("routers") else ""
        raise UsageError(message, where=where, hint=hint)


def plan_stream(
    config: Any, plan: Plan, analysis: Analysis, *, router_loss: str | None = None, **how: Any
) -> PlanStream:
    """The steps of a plan for a model of this config; `how`, and what it raises: see `PlanStream` and `check_plan`."""
    stream = PlanStream(plan, analysis, vocab_size=config.vocab_size, max_positions=max_positions(config), **how)
    check_plan(config, plan, router_loss)
    return stream
