"""What layers are made of, by the entries of a config.json: attention, recurrences, and MLPs, as fields of a `Layer`.

Matrices and states are those of the models in transformers; biases, norms and routers are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
