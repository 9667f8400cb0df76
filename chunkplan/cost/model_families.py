"""The layers of families of models, by the entries of a config.json: which one is of which type, and what each has.

What an entry means is as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from chunkplan.domains import Expected

# What layers are made of, by the entries of a config.json: attention, recurrences, and MLPs, as fields of a `Layer`.
#
# Matrices and states are those of the models in transformers; biases, norms and routers are left out.


Config = Mapping[str, Any]

#: Fields of a `Layer`.
Fields = dict[str, Any]


def grouped(config: Config, *, window: int | None = None, gate: bool = False, shared: bool = False) -> Fields:
    """Grouped queries (Ainslie et al., arXiv 2305.13245), with a `window` if one is given.

    `gate`: outputs have a gate of their own. `shared`: values are what keys are projected to. Queries and
    keys have norms where the config, or its family, says `use_qk_norm`.
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
        "window": window,
        "mixer_parameters": hidden * ((3 if gate else 2) * query + (1 if shared else 2) * kv),
        "mixed_width": 2 * query if gate else 0,
        "normed_width": query + kv if config.get("use_qk_norm") else 0,
        "wide_norms": bool(config.get("wide_norms")),
    }


def latent(config: Config) -> Fields:
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


def delta_rule(config: Config) -> Fields:
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


def kimi_delta(config: Config) -> Fields:
    """Kimi Delta Attention (arXiv 2510.26692): the delta rule with a decay for each channel, in two narrow matrices."""
    hidden, heads, dim = config["hidden_size"], config["linear_num_heads"], config["linear_head_dim"]
    width, kernel = heads * dim, config["linear_conv_kernel_dim"]
    return {
        "state_elements": width * dim + 3 * width * kernel,
        "state_products": 3,
        "mixer_parameters": hidden * (4 * width + 2 * dim + heads) + 2 * dim * width + 3 * width * kernel,
        "mixed_width": 10 * width,
    }


def mamba2(config: Config, *, heads: int, head_dim: int, groups: int, state: int, kernel: int) -> Fields:
    """Mamba-2 (Dao and Gu, arXiv 2405.21060): a token writes the state and reads it."""
    inner = heads * head_dim
    convolved = inner + 2 * groups * state
    return {
        "state_elements": inner * state + convolved * kernel,
        "state_products": 2,
        "mixer_parameters": config["hidden_size"] * (2 * inner + convolved + heads) + convolved * kernel,
        "mixed_width": 2 * convolved + 3 * inner,
    }


def mamba(config: Config) -> Fields:
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


def short_convolution(config: Config) -> Fields:
    """The gated short convolution of LFM2 (arXiv 2511.23404), whose state are the last columns."""
    hidden, kernel = config["hidden_size"], config["conv_L_cache"]
    return {
        "state_elements": hidden * kernel,
        "state_products": 1,
        "mixer_parameters": hidden * (4 * hidden + kernel),
        "mixed_width": 6 * hidden,
    }


def dense(width: int) -> Fields:
    """An MLP that every token passes through."""
    return {"mlp_width": width, "all_mlp_width": width}


def experts(config: Config, width: int, shared: int = 0) -> Fields:
    """Experts of `width`, of which a token is sent to some, and `shared` width that every token passes through."""
    sent = config["num_experts_per_tok"]
    return {
        "mlp_width": sent * width + shared,
        "all_mlp_width": config["num_experts"] * width + shared,
        "experts_per_token": sent,
    }


FULL, SLIDING, LINEAR, CHUNKED = "full_attention", "sliding_attention", "linear_attention", "chunked_attention"
CONVOLUTION, EXPERTS, MLP = "conv", "moe", "mlp"

#: What a config has of a layer: its fields, by the type that it has in `layer_types` and by its place.
LayerOf = Callable[[Config, str, int], Fields]


class Family(NamedTuple):
    """A type of models.

    `expected`: entries, see `find_mismatch`. `layer`: the fields of a layer. `type_of`: the type of the layer at a
    place, where there is no list of `layer_types`, or where models of the type do not go by it (`has_types` is false).
    `types`: those that layers may be of. `defaults`: entries that configs leave out.
    """

    expected: Mapping[str, Expected]
    layer: LayerOf
    type_of: Callable[[Config, int], str] = lambda config, place: FULL
    has_types: bool = False
    types: tuple[str, ...] = (FULL,)
    defaults: Config = MappingProxyType({})


# ---- layers


def _window(config: Config, kind: str) -> int | None:
    return config["sliding_window"] if kind == SLIDING else None


def plain(config: Config, kind: str, place: int) -> Fields:
    """Grouped queries, with a window in layers that slide, and a gated MLP."""
    return grouped(config, window=_window(config, kind)) | dense(config["intermediate_size"])


def gemma(config: Config, kind: str, place: int) -> Fields:
    """As `plain`, with norms before and after attention and the MLP."""
    return plain(config, kind, place) | {"num_norms": 4}


def gemma4(config: Config, kind: str, place: int) -> Fields:
    """Layers that see everything have heads of other sizes, and may have no values of their own."""
    shared = bool(config.get("attention_k_eq_v")) and kind == FULL
    own = {**config}
    if kind == FULL:
        own["head_dim"] = config.get("global_head_dim") or 512
        own["num_key_value_heads"] = (shared and config.get("num_global_key_value_heads")) or own["num_key_value_heads"]
    if config.get("per_layer_config") is not None:  # as transformers writes it
        own = {**config, **{int(key): each for key, each in config["per_layer_config"].items()}.get(place, {})}
    attention = grouped(own, window=_window(config, kind), shared=shared)
    if not config.get("enable_moe_block"):
        return attention | dense(config["intermediate_size"]) | {"num_norms": 4}
    mlp = experts(config, config["moe_intermediate_size"], shared=config["intermediate_size"])
    return attention | mlp | {"num_norms": 7}


def mixture(config: Config, kind: str, place: int) -> Fields:
    """Experts in every layer, whose width is that of MLPs elsewhere."""
    return grouped(config, window=_window(config, kind)) | experts(config, config["intermediate_size"])


def _qwen_mlp(config: Config, place: int) -> Fields:
    is_sparse = (place + 1) % config.get("decoder_sparse_step", 1) == 0
    if not is_sparse or place in (config.get("mlp_only_layers") or ()):
        return dense(config["intermediate_size"])
    return experts(config, config["moe_intermediate_size"], config.get("shared_expert_intermediate_size", 0))


def qwen_moe(config: Config, kind: str, place: int) -> Fields:
    """Grouped queries, and in most layers experts beside shared ones."""
    return grouped(config, window=_window(config, kind)) | _qwen_mlp(config, place)


def delta(config: Config, kind: str, place: int) -> Fields:
    """Qwen3-Next and what follows it: gated attention among layers of linear attention."""
    mixer = delta_rule(config) if kind == LINEAR else grouped(config, gate=True)
    return mixer | (_qwen_mlp(config, place) if "num_experts" in config else dense(config["intermediate_size"]))


def olmo_hybrid(config: Config, kind: str, place: int) -> Fields:
    """Attention among layers of linear attention, and a gated MLP in each."""
    return (delta_rule(config) if kind == LINEAR else grouped(config)) | dense(config["intermediate_size"])


def _routed_mlp(config: Config, place: int) -> Fields:
    """DeepSeek's: dense in the first layers, then fine-grained experts beside shared ones."""
    by_layer = config.get("mlp_layer_types")
    is_dense = by_layer[place] == "dense" if by_layer else place < config["first_k_dense_replace"]
    if is_dense:
        return dense(config["intermediate_size"])
    width = config["moe_intermediate_size"]
    shared = (config.get("n_shared_experts") or 0) * width
    return experts(config, width, shared) | {"router_width": config["hidden_size"]}


def deepseek(config: Config, kind: str, place: int) -> Fields:
    """Latent attention, and experts but in the first layers."""
    return latent(config) | _routed_mlp(config, place)


def glm_moe(config: Config, kind: str, place: int) -> Fields:
    """Grouped queries, and experts but in the first layers."""
    return grouped(config) | _routed_mlp(config, place)


def kimi(config: Config, kind: str, place: int) -> Fields:
    """Latent attention among layers of Kimi Delta Attention, and experts but in the first layers."""
    return (kimi_delta(config) if kind == LINEAR else latent(config)) | _routed_mlp(config, place)


def llama4(config: Config, kind: str, place: int) -> Fields:
    """Grouped queries, within chunks in some layers, and in every layer or every other one experts."""
    attention = grouped(config, window=config["attention_chunk_size"] if kind == CHUNKED else None)
    step, listed = config.get("interleave_moe_layer_step", 1), config.get("moe_layers")
    is_sparse = place in listed if listed is not None else (place + 1) % step == 0
    width = config["intermediate_size"]
    mlp = experts(config, width, shared=width) if is_sparse else dense(config["intermediate_size_mlp"])
    return attention | {"window_restarts": kind == CHUNKED} | mlp


def _state_space(config: Config) -> Fields:
    heads, inner = config["mamba_n_heads"], config["mamba_expand"] * config["hidden_size"]
    head_dim = config.get("mamba_d_head", "auto")
    return mamba2(
        config,
        heads=heads,
        head_dim=(config.get("mamba_d_ssm") or inner) // heads if head_dim == "auto" else head_dim,
        groups=config["mamba_n_groups"],
        state=config["mamba_d_state"],
        kernel=config["mamba_d_conv"],
    )


def granite_hybrid(config: Config, kind: str, place: int) -> Fields:
    """Attention among layers of Mamba-2, with experts, a shared MLP, or both."""
    shared = config["shared_intermediate_size"]
    mlp = experts(config, config["intermediate_size"], shared) if config["num_experts"] else dense(shared)
    return (_state_space(config) if kind == LINEAR else grouped(config)) | mlp


def bamba(config: Config, kind: str, place: int) -> Fields:
    """Attention among layers of Mamba-2, and a gated MLP in each."""
    return (_state_space(config) if kind == LINEAR else grouped(config)) | dense(config["intermediate_size"])


def falcon_h1(config: Config, kind: str, place: int) -> Fields:
    """Attention and a state space side by side in every layer."""
    attention, states = grouped(config), _state_space(config)
    both = {"mixer_parameters": attention["mixer_parameters"] + states["mixer_parameters"]}
    return attention | states | both | dense(config["intermediate_size"])


def jamba(config: Config, kind: str, place: int) -> Fields:
    """Attention among layers of Mamba, and experts in some."""
    mixer = mamba(config) if kind == LINEAR else grouped(config)
    is_sparse = place % config["expert_layer_period"] == config["expert_layer_offset"]
    width = config["intermediate_size"]
    return mixer | (experts(config, width) if is_sparse and config["num_experts"] > 1 else dense(width))


def nemotron_h(config: Config, kind: str, place: int) -> Fields:
    """Every layer is one of the four, behind one norm; MLPs have no gate."""
    if kind == FULL:
        return grouped(config) | {"num_norms": 1}
    if kind == LINEAR:
        sizes = {"heads": config["mamba_num_heads"], "head_dim": config["mamba_head_dim"]}
        sizes |= {"groups": config["n_groups"], "state": config["ssm_state_size"], "kernel": config["conv_kernel"]}
        return mamba2(config, **sizes) | {"num_norms": 1}
    if kind == MLP:
        return dense(config["intermediate_size"]) | {"num_norms": 1, "is_gated": False}
    shared = config["moe_shared_expert_intermediate_size"]
    return experts(config, config["moe_intermediate_size"], shared) | {"num_norms": 1, "is_gated": False}


def pure_mamba2(config: Config, kind: str, place: int) -> Fields:
    """A layer of Mamba-2 and nothing else."""
    sizes = {"heads": config["num_heads"], "head_dim": config["head_dim"], "groups": config["n_groups"]}
    return mamba2(config, **sizes, state=config["state_size"], kernel=config["conv_kernel"]) | {"num_norms": 1}


def lfm2(config: Config, kind: str, place: int) -> Fields:
    """Attention among short convolutions, and a gated MLP or experts in each."""
    mixer = short_convolution(config) if kind == CONVOLUTION else grouped(config)
    if "num_dense_layers" in config and place >= config["num_dense_layers"]:
        return mixer | experts(config, config["moe_intermediate_size"])
    width = config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):
        multiple = config["block_multiple_of"]
        width = int(config["block_ffn_dim_multiplier"] * (2 * width // 3))
        width = multiple * -(-width // multiple)
    return mixer | dense(width)


# ---- which layers are of which type


def every(interval: str, default: int, others: str) -> Callable[[Config, int], str]:
    """Every so many layers one that sees everything, by the entry `interval`."""
    return lambda config, place: others if (place + 1) % (config.get(interval) or default) else FULL


def all_slide(config: Config, place: int) -> str:
    """Whether there is a window, which all layers then have."""
    return SLIDING if config.get("sliding_window") else FULL


def all_slide_if_used(config: Config, place: int) -> str:
    """Whether there is a window that is used, which all layers then have."""
    return SLIDING if config.get("use_sliding_window") and config.get("sliding_window") else FULL


def later_slide(config: Config, place: int) -> str:
    """Whether there is a window that is used, which layers from `max_window_layers` on then have."""
    first = config.get("max_window_layers")
    return all_slide_if_used(config, place) if place >= (28 if first is None else first) else FULL


def qwen2_moe_type(config: Config, place: int) -> str:
    """Every other layer before `max_window_layers` has the window, if it is used."""
    most = config.get("max_window_layers")
    slides = place % 2 == 0 and place < (28 if most is None else most)
    return all_slide_if_used(config, place) if slides else FULL


def gemma4_type(config: Config, place: int) -> str:
    """Every sixth layer sees everything, and the last one."""
    return FULL if place == config["num_hidden_layers"] - 1 or (place + 1) % 6 == 0 else SLIDING


def llama4_type(config: Config, place: int) -> str:
    """Layers with rotary embeddings see their chunk only."""
    has_rope = config.get("no_rope_layers") or ()
    rotates = has_rope[place] if place < len(has_rope) else (place + 1) % config.get("no_rope_layer_interval", 4)
    return CHUNKED if rotates and config.get("attention_chunk_size") else FULL


def kimi_type(config: Config, place: int) -> str:
    """Every fourth layer but the first has attention."""
    return FULL if place and place % 4 == 0 else LINEAR


def bamba_type(config: Config, place: int) -> str:
    """The layers that are listed have attention."""
    return FULL if place in (config.get("attn_layer_indices") or ()) else LINEAR


def jamba_type(config: Config, place: int) -> str:
    """One layer of each period has attention."""
    return FULL if place % config["attn_layer_period"] == config["attn_layer_offset"] else LINEAR


def lfm2_type(config: Config, place: int) -> str:
    """The layers that are listed have attention, all if none are."""
    full = config.get("full_attn_idxs")
    return FULL if full is None or place in full else CONVOLUTION


def linear(config: Config, place: int) -> str:
    """No layer has attention."""
    return LINEAR
