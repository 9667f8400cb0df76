"""What of a model's config chunked execution knows, and which entries of it are refused before anything is built.

Whether gradients are exact for a model is measured (`proof`). What is refused here is what no small model would show:
what depends on the data, on how long a sequence is, or on what else is asked of a training.
"""

from __future__ import annotations

import re
from typing import Any

import transformers
from torch import nn
from transformers import CONFIG_MAPPING

from chunkplan.cost import model_config
from chunkplan.errors import UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan
from chunkplan_runtime.feed.stream import PlanStream
from chunkplan_runtime.layout import used_blocks
from chunkplan_runtime.models.recurrent import is_recurrent

#: Types whose every feature is known here, and held by the tests of this project: of others a small model is run first
#: (`proof`).
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

#: These choose their frequencies by the longest position of a call, so that a part of a sequence would be rotated
#: otherwise than the whole.
_LENGTH_ROPE_TYPES = ("dynamic", "longrope")

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

#: Kinds of layers that these types may have.
_LAYER_TYPES = ("full_attention", "sliding_attention")

#: Those of them whose layers go by `layer_types`.
_WINDOWS_BY_LAYER = ("gemma2", "gemma3_text", "qwen2", "qwen2_moe", "qwen3", "smollm3")

#: Models with the same sliding window in all layers, or in none, whatever `layer_types` says.
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


def check_known(model_type: str, where: str) -> None:
    """Refuse a type of models that transformers does not have.

    Raises:
        UsageError: naming it.
    """
    if model_type not in CONFIG_MAPPING:
        raise UsageError(
            f"transformers {transformers.__version__} has no model type {model_type!r}",
            where=where,
            hint="give the config.json of a model that it has, or install the version that brings this one",
        )


def is_bidirectional(config: Any) -> bool:
    """Whether tokens see those that come after them. Only Gemma 3 has an option of its own for it."""
    looks_ahead = config.model_type == "gemma3_text" and bool(config.use_bidirectional_attention)
    return not getattr(config, "is_causal", True) or looks_ahead


def with_infinities(document: Any) -> Any:
    """A document in which transformers wrote infinity as {"__float__": "Infinity"}, with the numbers themselves."""
    if isinstance(document, list):
        return [with_infinities(value) for value in document]
    if not isinstance(document, dict):
        return document
    if list(document) == ["__float__"] and document["__float__"] in ("Infinity", "-Infinity"):
        return float(document["__float__"])
    return {name: with_infinities(value) for name, value in document.items()}


def entry_of(config: Any, name: str, default: Any = None) -> Any:
    """What a config has under a name; the largest where its layers have different sizes."""
    try:
        return getattr(config, name, default)
    except RuntimeError:  # transformers refuses to say one for all layers
        return max(getattr(config.per_layer_config[layer], name) for layer in range(config.num_hidden_layers))


def windows(config: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer, in tokens; None for full attention.

    It is what its config says, by which memory is reserved and work is counted. What a layer does is said by its mask.
    """
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if config.model_type in MODEL_TYPES and config.model_type not in (*_WINDOWS_BY_LAYER, *_ONE_WINDOW):
        window = None  # they have none, whatever their config says
    if kinds is None or (config.model_type not in _WINDOWS_BY_LAYER and config.model_type in MODEL_TYPES):
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def kv_shapes(config: Any, layer: int | None = None) -> tuple[tuple[int, int], tuple[int, int]]:
    """What a layer keeps of a token: (heads, dim) of its key, and of its value; without `layer`, the largest of all."""
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
    """What attention of a layer gives of a token: (heads, dim)."""
    by_layer = getattr(config, "per_layer_config", None)
    heads: int = entry_of(config if by_layer is None else by_layer[layer], "num_attention_heads") or 1
    return heads, kv_shapes(config, layer)[1][1]


def max_positions(config: Any) -> int | None:
    """How many tokens a sequence may have, by the rule that the planner goes by too."""
    return model_config.max_positions(config.to_dict())


def check_config(config: Any, where: str, *, router_loss: bool = False) -> None:
    """Refuse a model that chunked execution would get wrong.

    `router_loss`: the load-balancing loss that its config may ask for is seen to elsewhere (`router_loss`).

    Raises:
        UsageError: naming what, and what to do about it.
    """
    text = config.get_text_config(decoder=True)
    if text.model_type != config.model_type:
        raise UsageError(
            f"a {config.model_type} model is one of text and more",
            where=where,
            hint=f"train its language model, of type {text.model_type}: `python -m chunkplan_runtime.train` takes that",
        )
    if text is not config or getattr(config, "is_encoder_decoder", False):
        raise UsageError(f"a {config.model_type} model has an encoder", where=where, hint="take one of decoders only")
    for name in _SIZES:
        given = entry_of(config, name, 1)
        for size in given if isinstance(given, (list, tuple)) else [given]:  # some have one for each layer
            if size is not None and (type(size) is not int or size < 1):
                raise UsageError(f"{name} is {size!r}", where=where, hint="give a whole number from 1")
    rope = getattr(config, "rope_parameters", None)
    for entry in model_config.rope_entries(rope) if rope else ():
        rope_type = entry.get("rope_type")
        is_tested = config.model_type in MODEL_TYPES
        if rope_type in _LENGTH_ROPE_TYPES or (is_tested and rope_type not in _ROPE_TYPES):
            raise UsageError(
                f"rope type {rope_type!r} depends on more than positions, or is not known",
                where=where,
                hint=f"exact for: {', '.join(_ROPE_TYPES)}; choose one of them for training",
            )
    if config.model_type in MODEL_TYPES:
        _check_windows(config, where)
    _check_values(config, where)
    if getattr(config, "output_router_logits", False) and not router_loss:
        raise UsageError(
            "output_router_logits asks for a load-balancing loss, which is no sum over chunks",
            where=where,
            hint="train with chunkplan_runtime.train or ChunkTrainer, which add it, or set it to false to go without",
        )


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
    for name in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"):
        if getattr(config, name, None):
            raise UsageError(f"{name} is {getattr(config, name)}", where=where, hint="set it to 0")
    if getattr(config, "quantization_config", None):
        raise UsageError("the model is quantized", where=where, hint="train from weights that are not quantized")
    padding = getattr(config, "pad_token_id", None)
    if padding is not None and not 0 <= padding < config.vocab_size:
        raise UsageError(
            f"pad_token_id is {padding}, the vocabulary has {config.vocab_size:,}",
            where=where,
            hint="set it to null, or to a token of the vocabulary",
        )
    heads, kv_heads = (entry_of(config, name) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads and kv_heads and heads % kv_heads:
        raise UsageError(
            f"{heads} attention heads cannot share {kv_heads} KV heads",
            where=where,
            hint="num_attention_heads has to be a multiple of num_key_value_heads",
        )


#: How many experts there are, by what configs call it.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

#: To how many of them a token goes.
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def has_experts(model: nn.Module, config: Any) -> bool:
    """Whether layers of a model of this config may have experts: the config names some, or weights are called so."""
    named = all(any(getattr(config, name, None) for name in names) for names in (NUM_EXPERTS, EXPERTS_PER_TOKEN))
    return named or any(".experts." in name for name, _ in model.named_parameters())


def share_of_tokens(config: Any, name: str, weight: nn.Parameter, module: nn.Module) -> float:
    """The share of tokens that meet a weight of `module`: all of them, or of experts those that go there.

    The weights of all experts are one, [num_experts, ...], or those of each expert are by themselves.
    """
    num_experts, chosen = (_first(config, names, _layer_of(name)) for names in (NUM_EXPERTS, EXPERTS_PER_TOKEN))
    if not num_experts or not chosen:
        return 1.0
    if re.search(r"\bexperts\.\d+\.", name):
        return min(chosen / num_experts, 1.0)
    is_stack = weight.ndim == 3 and not isinstance(module, _CONVOLUTIONS)
    if is_stack and (weight.shape[0] == num_experts or ".experts." in name):
        return min(chosen / weight.shape[0], 1.0)
    return 1.0


def _first(config: Any, names: tuple[str, ...], layer: int) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)):  # of some models an entry a layer
            value = value[layer] if 0 <= layer < len(value) else None
        if type(value) is int and value > 0:
            return value
    return None


def _layer_of(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else -1


def check_plan(config: Any, plan: Plan, router_loss: str | None = None) -> None:
    """Refuse a plan that a model of this transformers config cannot be run with.

    `router_loss`: what its load-balancing loss is over, if it has one.

    Raises:
        UsageError: the plan splits sequences and the model looks both ways, more processes are to share heads than
            can, or none would count a whole sequence.
    """
    shared = [block.heads for block in used_blocks(plan)]
    if shared and is_recurrent(config):
        raise UsageError(
            f"processes cannot share sequences of a {config.model_type} model, whose layers keep a state",
            where=str(plan.path),
            hint="build the plan with `--cp off`",
        )
    if shared and router_loss == "sequence":
        raise UsageError(
            "with --router-loss sequence processes cannot share sequences, of which none would count a whole one",
            where=str(plan.path),
            hint="build the plan with `--cp off`, or train with `--router-loss batch`",
        )
    (kv_heads, _), _ = kv_shapes(config)
    of_model = {"key and value heads": kv_heads, "heads": getattr(config, "num_attention_heads", kv_heads)}
    uneven = [(num, name, heads) for name, heads in of_model.items() for num in shared if heads % num]
    if uneven:
        num, name, heads = uneven[0]
        raise UsageError(
            f"{num} processes cannot share the model's {heads} {name} evenly",
            where=str(plan.path),
            hint="build the plan with the --model-config of this model",
        )
    if not is_bidirectional(config):
        return
    groups = plan.chunks().column("group_id")
    if groups.null_count < len(groups):
        raise UsageError(
            "the plan splits sequences, and in this model tokens see those that come after them",
            where=str(plan.path),
            hint="build the plan with `--no-split`, and a --chunk-size of the longest sequence",
        )


def plan_stream(
    config: Any, plan: Plan, analysis: Analysis, *, router_loss: str | None = None, **how: Any
) -> PlanStream:
    """The steps of a plan for a model of this transformers config; `how`: as `PlanStream`.

    Raises:
        UsageError: see `check_plan` and `PlanStream`.
    """
    stream = PlanStream(plan, analysis, vocab_size=config.vocab_size, max_positions=max_positions(config), **how)
    check_plan(config, plan, router_loss)
    return stream
