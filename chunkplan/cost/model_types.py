"""The types of models whose cost is known, and what their config.json has to say.

What an entry is called, what it means, and what it is when it is missing is as in transformers.
"""

from __future__ import annotations

from chunkplan.cost import model_families as of
from chunkplan.cost.model_families import CHUNKED, CONVOLUTION, EXPERTS, FULL, LINEAR, MLP, SLIDING, Family
from chunkplan.domains import FLAG, Domain, Expected, or_null, whole

Entries = dict[str, Expected]

_MOST = 2**31 - 1


def _is_of_layer(entry: tuple[str, object]) -> bool:
    """Whether it says of the layer at a place what Gemma 4 may say, and no more."""
    place, own = entry
    names = {"head_dim", "num_key_value_heads"}
    is_known = isinstance(own, dict) and own.keys() <= names and all(map(_SIZE.holds, own.values()))
    return is_known and place.isdecimal() and len(place) < 7


_SIZE = whole(1, _MOST)
_COUNT = whole(0, _MOST)
_MAYBE = or_null(_SIZE)
_PLACES = or_null(
    Domain(lambda value: isinstance(value, list) and all(type(each) is int for each in value), "a list of numbers")
)
_AUTO = Domain(lambda value: value == "auto" or _SIZE.holds(value), 'a whole number from 1, or "auto"')
_BY_LAYER = Domain(
    lambda value: isinstance(value, dict) and all(map(_is_of_layer, value.items())),
    "`head_dim` and `num_key_value_heads` by layer",
)
_NOTHING = Domain(lambda value: not value, "nothing: models with it are not known")

_ALL: Entries = {"hidden_size": _SIZE, "vocab_size": _SIZE, "num_hidden_layers": whole(1, 100_000)}
_HEADS: Entries = {**_ALL, "num_attention_heads": _SIZE, "num_key_value_heads?": _MAYBE, "head_dim?": _MAYBE}
_DENSE: Entries = {**_HEADS, "intermediate_size": _SIZE}
_HEAD_DIM: Entries = {"head_dim": _SIZE}

#: The window may be there and not be used.
_WINDOW: Entries = {
    "sliding_window?": or_null(_COUNT),
    "use_sliding_window?": FLAG,
    "max_window_layers?": or_null(_COUNT),
}
_SLIDING: Entries = {"sliding_window": _SIZE, "sliding_window_pattern?": _SIZE}

#: Experts have several names, see `_NAMES` of `model_config`.
_EXPERTS: Entries = {"num_experts": _SIZE, "num_experts_per_tok": _SIZE, "moe_intermediate_size": _SIZE}
_LOCAL: Entries = {**_DENSE, "num_local_experts": _SIZE, "num_experts_per_tok": _SIZE}
_QWEN_MOE: Entries = {
    **_HEADS,
    **_EXPERTS,
    "decoder_sparse_step?": _SIZE,
    "mlp_only_layers?": _PLACES,
    "intermediate_size?": _SIZE,
}
_ROUTED: Entries = {
    **_DENSE,
    "n_routed_experts": _SIZE,
    "num_experts_per_tok": _SIZE,
    "moe_intermediate_size": _SIZE,
    "n_shared_experts?": or_null(_COUNT),
    "first_k_dense_replace?": _COUNT,
    "mlp_layer_types?": or_null(
        Domain(
            lambda value: isinstance(value, list) and all(each in ("dense", "sparse") for each in value),
            'a list of "dense" and "sparse"',
        )
    ),
}
_LATENT: Entries = {
    "q_lora_rank?": _MAYBE,
    "kv_lora_rank": _SIZE,
    "qk_rope_head_dim": _SIZE,
    "qk_nope_head_dim": _SIZE,
    "v_head_dim": _SIZE,
}
_DELTA: Entries = {
    "linear_conv_kernel_dim": _SIZE,
    "linear_key_head_dim": _SIZE,
    "linear_value_head_dim": _SIZE,
    "linear_num_key_heads": _SIZE,
    "linear_num_value_heads": _SIZE,
}
_QWEN_DELTA: Entries = {**_HEAD_DIM, **_DELTA, "full_attention_interval?": _SIZE}
_SHARED: Entries = {"shared_expert_intermediate_size": _COUNT}
_MAMBA2: Entries = {
    "mamba_n_heads": _SIZE,
    "mamba_d_head?": _AUTO,
    "mamba_n_groups": _SIZE,
    "mamba_d_state": _SIZE,
    "mamba_d_conv": _SIZE,
    "mamba_expand": _SIZE,
}
_CONVOLUTIONS: Entries = {**_DENSE, "conv_L_cache": _SIZE, "full_attn_idxs?": _PLACES}

_SLIDES, _HYBRID = (FULL, SLIDING), (FULL, LINEAR)
_TIED, _WINDOWED = {"tie_word_embeddings": True}, {"sliding_window": 4096}
_NORMED = {"use_qk_norm": True}
_WIDE = {**_NORMED, "wide_norms": True}
_LATENT_EXPERTS = Family({**_ROUTED, **_LATENT}, of.deepseek, defaults={"first_k_dense_replace": 3})
_EVERY_FOURTH = of.every("full_attention_interval", 4, LINEAR)
_QWEN_HYBRID = Family({**_DENSE, **_QWEN_DELTA}, of.delta, _EVERY_FOURTH, True, _HYBRID, _WIDE)
_QWEN_HYBRID_MOE = Family({**_QWEN_MOE, **_QWEN_DELTA, **_SHARED}, of.delta, _EVERY_FOURTH, True, _HYBRID, _WIDE)

#: By `model_type`.
FAMILIES: dict[str, Family] = {
    "bamba": Family({**_DENSE, **_MAMBA2, "attn_layer_indices?": _PLACES}, of.bamba, of.bamba_type, True, _HYBRID),
    "cohere": Family(_DENSE, of.plain, defaults=_TIED),
    "cohere2": Family(
        {**_DENSE, **_SLIDING}, of.plain, of.every("sliding_window_pattern", 4, SLIDING), True, _SLIDES, _TIED
    ),
    "deepseek_v3": _LATENT_EXPERTS,
    "falcon_h1": Family({**_DENSE, **_MAMBA2, "mamba_d_ssm?": _MAYBE}, of.falcon_h1),
    "gemma2": Family(
        {**_DENSE, **_HEAD_DIM, **_SLIDING},
        of.gemma,
        of.every("", 2, SLIDING),
        True,
        _SLIDES,
        {**_TIED, **_WINDOWED, "wide_norms": True, "head_dim": 256},
    ),
    "gemma3_text": Family(
        {**_DENSE, **_HEAD_DIM, **_SLIDING, "use_bidirectional_attention?": _NOTHING},
        of.gemma,
        of.every("sliding_window_pattern", 6, SLIDING),
        True,
        _SLIDES,
        {
            **_TIED,
            **_WIDE,
            "head_dim": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262208,
            "sliding_window": 4096,
        },
    ),
    "gemma4_text": Family(
        {
            **_DENSE,
            **_HEAD_DIM,
            **_SLIDING,
            "num_key_value_heads": _SIZE,
            "global_head_dim?": _MAYBE,
            "per_layer_config?": or_null(_BY_LAYER),
            "num_global_key_value_heads?": _MAYBE,
            "attention_k_eq_v?": FLAG,
            "enable_moe_block?": FLAG,
            "num_experts?": _MAYBE,
            "num_experts_per_tok?": _MAYBE,
            "moe_intermediate_size?": _MAYBE,
            "hidden_size_per_layer_input": _NOTHING,
            "num_kv_shared_layers?": _NOTHING,
        },
        of.gemma4,
        of.gemma4_type,
        True,
        _SLIDES,
        {**_TIED, **_WIDE, "head_dim": 256, "hidden_size_per_layer_input": 256, "sliding_window": 512},
    ),
    "glm4": Family(_DENSE, of.gemma),
    "glm4_moe": Family(_ROUTED, of.glm_moe, defaults={"first_k_dense_replace": 1}),
    "glm4_moe_lite": _LATENT_EXPERTS._replace(defaults={"first_k_dense_replace": 1}),
    "gpt_oss": Family({**_LOCAL, **_HEAD_DIM, **_SLIDING}, of.mixture, of.every("", 2, SLIDING), True, _SLIDES),
    "granite": Family(_DENSE, of.plain),
    "granitemoe": Family(_LOCAL, of.mixture),
    "granitemoehybrid": Family(
        {
            **_DENSE,
            **_MAMBA2,
            "num_local_experts": _COUNT,
            "num_experts_per_tok": _COUNT,
            "shared_intermediate_size": _SIZE,
        },
        of.granite_hybrid,
        of.linear,
        True,
        _HYBRID,
    ),
    "jamba": Family(
        {
            **_DENSE,
            "num_experts": _SIZE,
            "num_experts_per_tok": _SIZE,
            "expert_layer_period": _SIZE,
            "expert_layer_offset": _COUNT,
            "attn_layer_period": _SIZE,
            "attn_layer_offset": _COUNT,
            "mamba_d_state": _SIZE,
            "mamba_d_conv": _SIZE,
            "mamba_expand": _SIZE,
            "mamba_dt_rank?": _AUTO,
        },
        of.jamba,
        of.jamba_type,
        types=_HYBRID,
    ),
    "kimi_k2": _LATENT_EXPERTS,
    "kimi_linear": Family(
        {
            **_ROUTED,
            **_LATENT,
            "linear_conv_kernel_dim": _SIZE,
            "linear_head_dim": _SIZE,
            "linear_num_heads": _SIZE,
        },
        of.kimi,
        of.kimi_type,
        True,
        _HYBRID,
        {"first_k_dense_replace": 1},
    ),
    "lfm2": Family(
        {
            **_CONVOLUTIONS,
            "block_auto_adjust_ff_dim?": FLAG,
            "block_multiple_of?": _SIZE,
            "block_ffn_dim_multiplier?": Domain(
                lambda value: type(value) in (int, float) and 0 < value <= _MOST, "a number above 0"
            ),
        },
        of.lfm2,
        of.lfm2_type,
        True,
        (FULL, CONVOLUTION),
        {
            **_TIED,
            **_NORMED,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
        },
    ),
    "lfm2_moe": Family(
        {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": _COUNT},
        of.lfm2,
        of.lfm2_type,
        True,
        (FULL, CONVOLUTION),
        {**_TIED, **_NORMED},
    ),
    "llama": Family(_DENSE, of.plain),
    "llama4_text": Family(
        {
            **_LOCAL,
            **_HEAD_DIM,
            "intermediate_size_mlp": _SIZE,
            "interleave_moe_layer_step?": _SIZE,
            "moe_layers?": _PLACES,
            "no_rope_layers?": _PLACES,
            "no_rope_layer_interval?": _SIZE,
            "attention_chunk_size?": _MAYBE,
        },
        of.llama4,
        of.llama4_type,
        True,
        (FULL, CHUNKED),
        _NORMED,
    ),
    "mamba2": Family(
        {
            **_ALL,
            **dict.fromkeys(("num_heads", "head_dim", "state_size", "conv_kernel", "n_groups"), _SIZE),
        },
        of.pure_mamba2,
        of.linear,
        types=(LINEAR,),
    ),
    "minimax_m2": Family({**_LOCAL, **_HEAD_DIM}, of.mixture, defaults=_NORMED),
    "ministral3": Family({**_DENSE, **_HEAD_DIM, **_WINDOW}, of.plain, of.all_slide, types=_SLIDES),
    "mistral": Family({**_DENSE, **_WINDOW}, of.plain, of.all_slide, types=_SLIDES, defaults=_WINDOWED),
    "mixtral": Family({**_LOCAL, **_WINDOW}, of.mixture, of.all_slide, types=_SLIDES),
    "nemotron_h": Family(
        {
            **_DENSE,
            **_HEAD_DIM,
            **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"), _SIZE),
            "n_routed_experts?": _SIZE,
            "num_experts_per_tok?": _SIZE,
            "moe_intermediate_size?": _SIZE,
            "moe_shared_expert_intermediate_size?": _SIZE,
            "moe_latent_size?": _NOTHING,
        },
        of.nemotron_h,
        of.linear,
        True,
        (FULL, LINEAR, MLP, EXPERTS),
    ),
    "olmo2": Family(_DENSE, of.plain, defaults=_WIDE),
    "olmo3": Family({**_DENSE, **_SLIDING}, of.plain, of.every("", 4, SLIDING), True, _SLIDES, _WIDE),
    "olmo_hybrid": Family({**_DENSE, **_DELTA}, of.olmo_hybrid, of.every("", 4, LINEAR), True, _HYBRID, _WIDE),
    "phi3": Family({**_DENSE, **_WINDOW}, of.plain, of.all_slide, types=_SLIDES),
    "qwen2": Family({**_DENSE, **_WINDOW}, of.plain, of.later_slide, True, _SLIDES, _WINDOWED),
    "qwen2_moe": Family({**_QWEN_MOE, **_WINDOW, **_SHARED}, of.qwen_moe, of.qwen2_moe_type, True, _SLIDES, _WINDOWED),
    "qwen3": Family(
        {**_DENSE, **_HEAD_DIM, **_WINDOW}, of.plain, of.later_slide, True, _SLIDES, {**_WINDOWED, **_NORMED}
    ),
    "qwen3_5_moe_text": _QWEN_HYBRID_MOE,
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_moe": Family(
        {**_QWEN_MOE, **_WINDOW},
        of.qwen_moe,
        of.all_slide_if_used,
        types=_SLIDES,
        defaults={**_WINDOWED, **_NORMED},
    ),
    "qwen3_next": _QWEN_HYBRID_MOE,
}

#: Of models that see pictures too, which are trained on text here: the type of their `text_config`.
TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
