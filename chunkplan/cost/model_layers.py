"""Layers of models by the entries of a config.json: token mixers, MLPs, and the position of each.

What an entry means is as in transformers. Matrices and states are those of the models there; biases, norms and routers
are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Config = Mapping[str, Any]

#: Fields of a `Layer`.
Fields = dict[str, Any]

#: A part of the layer at a place, as fields of a `Layer`.
Part = Callable[[Config, int], Fields]

#: The type of the layer at a place.
TypeOf = Callable[[Config, int], str]

FULL, SLIDING, LINEAR, CHUNKED = "full_attention", "sliding_attention", "linear_attention", "chunked_attention"
CONVOLUTION, EXPERTS, MLP = "conv", "moe", "mlp"


# ---- what mixes tokens


def grouped(
    config: Config,
    place: int = 0,
    *,
    window: str = "",
    gate: bool = False,
    shared: bool = False,
    restarts: bool = False,
) -> Fields:
    """Grouped queries (Ainslie et al., arXiv 2305.13245), with the window that the entry `window` has.

    `gate`: outputs have a gate of their own. `shared`: values are what keys are projected to. `restarts`: windows lie
    side by side. Queries and keys have norms where the config, or its family, says `use_qk_norm`.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    query, kv = heads * head_dim, kv_heads * head_dim
    return {
        "num_query_heads": heads,
        "num_kv_heads": kv_heads,
        "query_width": query,
        "key_width": kv,
        "value_width": kv,
        "output_width": query,
        "window": config[window] if window else None,
        "window_restarts": restarts,
        "mixer_parameters": hidden * ((3 if gate else 2) * query + (1 if shared else 2) * kv),
        "mixed_width": 2 * query if gate else 0,
        "normed_width": query + kv if config.get("use_qk_norm") else 0,
        "wide_norms": bool(config.get("wide_norms")),
    }


sliding: Part = partial(grouped, window="sliding_window")


def gemma4(config: Config, place: int, *, kind: str) -> Fields:
    """Grouped queries; where they see everything, with heads of other sizes, which may have no values of their own."""
    shared = bool(config.get("attention_k_eq_v")) and kind == FULL
    own = {**config}
    if kind == FULL:
        own["head_dim"] = config.get("global_head_dim") or 512
        own["num_key_value_heads"] = (shared and config.get("num_global_key_value_heads")) or own["num_key_value_heads"]
    if config.get("per_layer_config") is not None:  # as transformers writes it
        own = {**config, **{int(key): each for key, each in config["per_layer_config"].items()}.get(place, {})}
    return grouped(own, window="" if kind == FULL else "sliding_window", shared=shared)


def latent(config: Config, place: int) -> Fields:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): every head has keys and values of its own."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rope, value, rank = config["qk_rope_head_dim"], config["v_head_dim"], config["kv_lora_rank"]
    key, query_rank = config["qk_nope_head_dim"] + rope, config.get("q_lora_rank") or 0
    queries = query_rank * (hidden + heads * key) if query_rank else hidden * heads * key
    keys_and_values = hidden * (rank + rope) + rank * heads * (key - rope + value)
    return {
        "num_query_heads": heads,
        "num_kv_heads": heads,
        "query_width": heads * key,
        "key_width": heads * key,
        "value_width": heads * value,
        "output_width": heads * value,
        "latent_width": rank + rope,
        "mixer_parameters": queries + keys_and_values + heads * value * hidden,
        "mixed_width": 2 * (query_rank + rank) + rope + heads * (key - rope),
        "normed_width": query_rank + rank,
    }


def delta_rule(config: Config, place: int) -> Fields:
    """Linear attention with the gated delta rule (Yang et al., arXiv 2412.06464), behind a short convolution.

    A token reads the state, corrects it and reads it again.
    """
    hidden, kernel = config["hidden_size"], config["linear_conv_kernel_dim"]
    key_dim, value_heads = config["linear_key_head_dim"], config["linear_num_value_heads"]
    key, value = config["linear_num_key_heads"] * key_dim, value_heads * config["linear_value_head_dim"]
    convolved = 2 * key + value
    return {
        "state_elements": value * key_dim + convolved * kernel,
        "state_products": 3,
        "mixer_parameters": hidden * (2 * key + 3 * value + 2 * value_heads) + convolved * kernel,
        "mixed_width": 2 * convolved + value + 2 * value_heads * key_dim + 2 * value,
    }


def kimi_delta(config: Config, place: int) -> Fields:
    """Kimi Delta Attention (arXiv 2510.26692): the delta rule with a decay for each channel, in two narrow matrices."""
    hidden, heads, dim = config["hidden_size"], config["linear_num_heads"], config["linear_head_dim"]
    width, kernel = heads * dim, config["linear_conv_kernel_dim"]
    return {
        "state_elements": width * dim + 3 * width * kernel,
        "state_products": 3,
        "mixer_parameters": hidden * (4 * width + 2 * dim + heads) + 2 * dim * width + 3 * width * kernel,
        "mixed_width": 10 * width,
    }


def mamba2(config: Config, place: int, *, names: str) -> Fields:
    """Mamba-2 (Dao and Gu, arXiv 2405.21060): a token writes the state and reads it.

    `names`: the entries for heads, their size, groups, state and kernel. Where configs leave the size to the others
    ("auto"), the heads share `mamba_d_ssm`, or `mamba_expand` hidden sizes.
    """
    heads, head_dim, groups, state, kernel = (config.get(name, "auto") for name in names.split())
    hidden = config["hidden_size"]
    if head_dim == "auto":
        head_dim = (config.get("mamba_d_ssm") or config["mamba_expand"] * hidden) // heads
    inner = heads * head_dim
    convolved = inner + 2 * groups * state
    return {
        "state_elements": inner * state + convolved * kernel,
        "state_products": 2,
        "mixer_parameters": hidden * (2 * inner + convolved + heads) + convolved * kernel,
        "mixed_width": 2 * convolved + 3 * inner,
    }


def mamba(config: Config, place: int) -> Fields:
    """Mamba (Gu and Dao, arXiv 2312.00752) as in Jamba: a state for each channel, and steps of a low rank."""
    hidden, state, kernel = config["hidden_size"], config["mamba_d_state"], config["mamba_d_conv"]
    inner, rank = config["mamba_expand"] * hidden, config.get("mamba_dt_rank", "auto")
    rank = -(-hidden // 16) if rank == "auto" else rank
    return {
        "state_elements": inner * (state + kernel),
        "state_products": 2,
        "mixer_parameters": inner * (3 * hidden + 2 * rank + 3 * state + kernel),
        "mixed_width": 6 * inner + rank + 2 * state,
    }


def short_convolution(config: Config, place: int) -> Fields:
    """The gated short convolution of LFM2 (arXiv 2511.23404), whose state are the last columns."""
    hidden, kernel = config["hidden_size"], config["conv_L_cache"]
    return {
        "state_elements": hidden * kernel,
        "state_products": 1,
        "mixer_parameters": hidden * (4 * hidden + kernel),
        "mixed_width": 6 * hidden,
    }


state_space: Part = partial(mamba2, names="mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv")


def falcon_h1(config: Config, place: int) -> Fields:
    """Attention and a state space side by side."""
    attention, states = grouped(config), state_space(config, place)
    return attention | states | {"mixer_parameters": attention["mixer_parameters"] + states["mixer_parameters"]}


# ---- MLPs, dense or of experts


def dense(config: Config, place: int = 0, *, width: str = "intermediate_size", is_gated: bool = True) -> Fields:
    """An MLP that every token passes through, of the width that an entry has."""
    return {"mlp_width": config[width], "all_mlp_width": config[width], "is_gated": is_gated}


def experts(
    config: Config, place: int = 0, *, width: str = "intermediate_size", shared: int | str = 0, is_gated: bool = True
) -> Fields:
    """Experts of a width, of which a token is sent to some, and `shared` width that every token passes through."""
    sent, beside = config["num_experts_per_tok"], config[shared] if isinstance(shared, str) else shared
    return {
        "mlp_width": sent * config[width] + beside,
        "all_mlp_width": config["num_experts"] * config[width] + beside,
        "experts_per_token": sent,
        "is_gated": is_gated,
    }


def qwen_experts(config: Config, place: int) -> Fields:
    """Experts beside shared ones in most layers, or where there are none, an MLP."""
    is_sparse = "num_experts" in config and (place + 1) % config.get("decoder_sparse_step", 1) == 0
    if not is_sparse or place in (config.get("mlp_only_layers") or ()):
        return dense(config)
    return experts(config, width="moe_intermediate_size", shared=config.get("shared_expert_intermediate_size", 0))


def routed(config: Config, place: int) -> Fields:
    """DeepSeek's: dense in the first layers, then fine-grained experts beside shared ones."""
    by_layer = config.get("mlp_layer_types")
    if by_layer[place] == "dense" if by_layer else place < config["first_k_dense_replace"]:
        return dense(config)
    shared = (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"]
    return experts(config, width="moe_intermediate_size", shared=shared) | {"router_width": config["hidden_size"]}


def gemma4_mlp(config: Config, place: int) -> Fields:
    """An MLP, beside which there may be experts, with norms of their own."""
    if not config.get("enable_moe_block"):
        return dense(config)
    return experts(config, width="moe_intermediate_size", shared="intermediate_size") | {"num_norms": 7}


def granite_mlp(config: Config, place: int) -> Fields:
    """Experts, a shared MLP, or both."""
    shared = "shared_intermediate_size"
    return experts(config, shared=shared) if config["num_experts"] else dense(config, width=shared)


def jamba_mlp(config: Config, place: int) -> Fields:
    """An MLP, or experts in one layer of each period."""
    is_sparse = place % config["expert_layer_period"] == config["expert_layer_offset"] and config["num_experts"] > 1
    return experts(config) if is_sparse else dense(config)


def llama4_mlp(config: Config, place: int) -> Fields:
    """Experts beside an MLP in the layers that are listed, or in every so many, and an MLP in the others."""
    step, listed = config.get("interleave_moe_layer_step", 1), config.get("moe_layers")
    is_sparse = place in listed if listed is not None else (place + 1) % step == 0
    return experts(config, shared="intermediate_size") if is_sparse else dense(config, width="intermediate_size_mlp")


def lfm2_mlp(config: Config, place: int) -> Fields:
    """An MLP, whose width may be adjusted, or behind the first layers experts."""
    if "num_dense_layers" in config and place >= config["num_dense_layers"]:
        return experts(config, width="moe_intermediate_size")
    width = config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):
        multiple = config["block_multiple_of"]
        width = int(config["block_ffn_dim_multiplier"] * (2 * width // 3))
        width = multiple * -(-width // multiple)
    return dense({"intermediate_size": width})


def nothing(config: Config, place: int) -> Fields:
    """No MLP: it is a layer of its own, or there is none."""
    return {}


# ---- which layers are of which type


def either(kind: str, others: str, holds: Callable[[Config, int], Any]) -> TypeOf:
    """`kind` for the layers of which `holds` is true."""
    return lambda config, place: kind if holds(config, place) else others


def every(interval: str, default: int, others: str) -> TypeOf:
    """Every so many layers one that sees everything, by the entry `interval`."""
    return either(others, FULL, lambda config, place: (place + 1) % (config.get(interval) or default))


def uses_window(config: Config, place: int = 0) -> bool:
    """True if the config has a window and enables it."""
    return bool(config.get("use_sliding_window") and config.get("sliding_window"))


def rotates(config: Config, place: int) -> bool:
    """True if a layer of Llama 4 has rotary embeddings, and so sees only its chunk."""
    listed = config.get("no_rope_layers") or ()
    by_interval = (place + 1) % config.get("no_rope_layer_interval", 4)
    return bool((listed[place] if place < len(listed) else by_interval) and config.get("attention_chunk_size"))
