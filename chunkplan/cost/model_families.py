"""The types of models whose cost is known, in one table: the entries of their config.json, and their layers.

Names, meanings and defaults of entries are those of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from chunkplan.cost import model_layers as of
from chunkplan.cost.model_layers import (
    CHUNKED,
    CONVOLUTION,
    EXPERTS,
    FULL,
    LINEAR,
    MLP,
    SLIDING,
    Config,
    Fields,
    Part,
    TypeOf,
)
from chunkplan.domains import FLAG, Domain, Expected, or_null, whole

_MOST = 2**31 - 1
_SIZE, _COUNT = whole(1, _MOST), whole(0, _MOST)


def _is_of_layer(entry: tuple[str, object]) -> bool:
    """True if an entry overrides, for one layer, only what Gemma 4 may override."""
    place, own = entry
    names = {"head_dim", "num_key_value_heads"}
    is_known = isinstance(own, dict) and own.keys() <= names and all(map(_SIZE.holds, own.values()))
    return is_known and place.isdecimal() and len(place) < 7


_PLACES = or_null(
    Domain(lambda value: isinstance(value, list) and all(type(each) is int for each in value), "a list of numbers")
)
_AUTO = Domain(lambda value: value == "auto" or _SIZE.holds(value), 'a whole number from 1, or "auto"')
_UNKNOWN = Domain(lambda value: not value, "nothing: models with it are not known")

#: Entries that are other than whole numbers from 1.
_SPECIAL = {
    "num_hidden_layers": whole(1, 100_000),
    **dict.fromkeys(("use_sliding_window", "attention_k_eq_v", "enable_moe_block", "block_auto_adjust_ff_dim"), FLAG),
    **dict.fromkeys(
        ("mlp_only_layers", "attn_layer_indices", "full_attn_idxs", "moe_layers", "no_rope_layers"), _PLACES
    ),
    **dict.fromkeys(("mamba_d_head", "mamba_dt_rank"), _AUTO),
    **dict.fromkeys(("use_bidirectional_attention", "hidden_size_per_layer_input"), _UNKNOWN),
    **dict.fromkeys(("num_kv_shared_layers", "moe_latent_size"), _UNKNOWN),
    "block_ffn_dim_multiplier": Domain(
        lambda value: type(value) in (int, float) and 0 < value <= _MOST, "a number above 0"
    ),
    "mlp_layer_types": Domain(
        lambda value: isinstance(value, list) and all(each in ("dense", "sparse") for each in value),
        'a list of "dense" and "sparse"',
    ),
    "per_layer_config": Domain(
        lambda value: isinstance(value, dict) and all(map(_is_of_layer, value.items())),
        "`head_dim` and `num_key_value_heads` by layer",
    ),
}


#: Of layers by their type.
Mixers = Mapping[str, Part]


class Family(NamedTuple):
    """A type of models.

    `entries`: the names of what its configs have to say, `name?` where it may be missing and `name|null` where it may
    be null too: whole numbers from 1, those with >=0 from 0, but for `_SPECIAL` ones. Of a name that is there twice the
    last one counts. `mixers`: of layers by the type that they have in `layer_types`. `type_of`: the type of the layer
    at a place, where there is no list of these, or where models of the type do not go by it (`has_types` is false).
    `defaults`: entries that configs leave out.
    """

    entries: str
    mixers: Mixers
    mlp: Part = of.dense
    type_of: TypeOf = lambda config, place: FULL
    has_types: bool = False
    defaults: Config = MappingProxyType({})
    num_norms: int = 2

    def expected(self) -> dict[str, Expected]:
        """Expected entries of the family's config, for `find_mismatch`."""
        found: dict[str, Expected] = {}
        for name, least, missing in re.findall(r"(\w+)(>=0)?(\?|\|null)?", self.entries):
            domain = _SPECIAL.get(name, _COUNT if least else _SIZE)
            for earlier in (name, f"{name}?"):
                found.pop(earlier, None)
            found[f"{name}?" if missing else name] = or_null(domain) if missing == "|null" else domain
        return found

    def layer(self, config: Config, kind: str, place: int) -> Fields:
        """The fields of the layer at a place."""
        return {"num_norms": self.num_norms} | self.mixers[kind](config, place) | self.mlp(config, place)


_ALL = "hidden_size vocab_size num_hidden_layers"
_HEADS = f"{_ALL} num_attention_heads num_key_value_heads|null head_dim|null"
_DENSE = f"{_HEADS} intermediate_size"
_SLIDING = f"{_DENSE} sliding_window sliding_window_pattern?"
_WINDOW = "sliding_window>=0|null use_sliding_window? max_window_layers>=0|null"  # may be there and not be used
_LOCAL = f"{_DENSE} num_local_experts num_experts_per_tok"
_EXPERTS = "num_experts num_experts_per_tok moe_intermediate_size"
_QWEN_MOE = f"{_HEADS} {_EXPERTS} decoder_sparse_step? mlp_only_layers? intermediate_size?"
_SHARED = "shared_expert_intermediate_size>=0"
_ROUTED = (
    f"{_DENSE} n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts>=0|null "
    "first_k_dense_replace>=0? mlp_layer_types|null"
)
_LATENT = f"{_ROUTED} q_lora_rank|null kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim"
_DELTA = "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads"
_GATED_DELTA = f"head_dim {_DELTA} full_attention_interval?"
_MAMBA2 = f"{_DENSE} mamba_n_heads mamba_d_head? mamba_n_groups mamba_d_state mamba_d_conv mamba_expand"
_PURE_MAMBA2 = "num_heads head_dim n_groups state_size conv_kernel"
_NEMOTRON_MAMBA2 = "mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel"
_LFM2 = f"{_DENSE} conv_L_cache full_attn_idxs?"
_LFM2_WIDTH = "block_auto_adjust_ff_dim? block_multiple_of? block_ffn_dim_multiplier?"
_JAMBA = (
    f"{_DENSE} num_experts num_experts_per_tok expert_layer_period expert_layer_offset>=0 attn_layer_period "
    "attn_layer_offset>=0 mamba_d_state mamba_d_conv mamba_expand mamba_dt_rank?"
)
_NEMOTRON = (
    f"{_DENSE} head_dim {_NEMOTRON_MAMBA2} n_routed_experts? num_experts_per_tok? moe_intermediate_size? "
    "moe_shared_expert_intermediate_size? moe_latent_size?"
)
_LLAMA4 = (
    f"{_LOCAL} head_dim intermediate_size_mlp interleave_moe_layer_step? moe_layers? no_rope_layers? "
    "no_rope_layer_interval? attention_chunk_size|null"
)
_GEMMA4 = (
    f"{_SLIDING} head_dim num_key_value_heads global_head_dim|null per_layer_config|null "
    "num_global_key_value_heads|null attention_k_eq_v? enable_moe_block? num_experts|null num_experts_per_tok|null "
    "moe_intermediate_size|null hidden_size_per_layer_input num_kv_shared_layers?"
)

_GROUPED, _SLIDES = {FULL: of.grouped}, {FULL: of.grouped, SLIDING: of.sliding}
_CHUNKS: Mixers = {FULL: of.grouped, CHUNKED: partial(of.grouped, window="attention_chunk_size", restarts=True)}
_GEMMA4_MIXERS: Mixers = {FULL: partial(of.gemma4, kind=FULL), SLIDING: partial(of.gemma4, kind=SLIDING)}
_STATES = {FULL: of.grouped, LINEAR: of.state_space}
_GATED: Mixers = {FULL: partial(of.grouped, gate=True), LINEAR: of.delta_rule}
_CONVOLUTIONS = {FULL: of.grouped, CONVOLUTION: of.short_convolution}
_ONE_OF_FOUR: Mixers = {
    FULL: of.grouped,
    LINEAR: partial(of.mamba2, names=_NEMOTRON_MAMBA2),
    MLP: partial(of.dense, is_gated=False),
    EXPERTS: partial(
        of.experts, width="moe_intermediate_size", shared="moe_shared_expert_intermediate_size", is_gated=False
    ),
}

_ALL_SLIDE = of.either(SLIDING, FULL, lambda config, place: config.get("sliding_window"))
_USED_SLIDE = of.either(SLIDING, FULL, lambda config, place: of.uses_window(config))
_LATER_SLIDE = of.either(
    SLIDING, FULL, lambda config, place: of.uses_window(config) and place >= config.get("max_window_layers", 28)
)
_FIRST_EVEN_SLIDE = of.either(
    SLIDING,
    FULL,
    lambda config, place: of.uses_window(config) and place % 2 == 0 and place < config.get("max_window_layers", 28),
)
_EVERY_OTHER, _EVERY_FOURTH = of.every("", 2, SLIDING), of.every("", 4, SLIDING)
_SIXTH_AND_LAST = of.either(
    FULL, SLIDING, lambda config, place: place == config["num_hidden_layers"] - 1 or (place + 1) % 6 == 0
)
_LISTED = of.either(FULL, LINEAR, lambda config, place: place in (config.get("attn_layer_indices") or ()))
_ONE_OF_PERIOD = of.either(
    FULL, LINEAR, lambda config, place: place % config["attn_layer_period"] == config["attn_layer_offset"]
)
_FOURTH_BUT_FIRST = of.either(FULL, LINEAR, lambda config, place: place and place % 4 == 0)
_LISTED_OR_ALL = of.either(FULL, CONVOLUTION, lambda config, place: place in config.get("full_attn_idxs", (place,)))
_LINEAR = of.either(LINEAR, LINEAR, lambda config, place: True)
_GATED_FOURTH = of.every("full_attention_interval", 4, LINEAR)

_TIED, _WINDOWED, _NORMED = {"tie_word_embeddings": True}, {"sliding_window": 4096}, {"use_qk_norm": True}
_WIDE = {**_NORMED, "wide_norms": True}
_TIED_NORMED, _WINDOWED_NORMED = {**_TIED, **_NORMED}, {**_WINDOWED, **_NORMED}
_GEMMA2_DEFAULTS = {**_TIED, **_WINDOWED, "wide_norms": True, "head_dim": 256}
_GEMMA3_DEFAULTS = {
    **_GEMMA2_DEFAULTS,
    **_NORMED,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
}
_GEMMA4_DEFAULTS = {**_TIED, **_WIDE, "head_dim": 256, "hidden_size_per_layer_input": 256, "sliding_window": 512}
_LFM2_DEFAULTS = {
    **_TIED_NORMED,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
}

_LATENT_EXPERTS = Family(_LATENT, {FULL: of.latent}, of.routed, defaults={"first_k_dense_replace": 3})
_QWEN_HYBRID = Family(f"{_DENSE} {_GATED_DELTA}", _GATED, of.qwen_experts, _GATED_FOURTH, True, _WIDE)
_QWEN_HYBRID_MOE = _QWEN_HYBRID._replace(entries=f"{_QWEN_MOE} {_GATED_DELTA} {_SHARED}")
_FIRST_DENSE = {"first_k_dense_replace": 1}

#: By `model_type`.
FAMILIES: dict[str, Family] = {
    "bamba": Family(f"{_MAMBA2} attn_layer_indices?", _STATES, of.dense, _LISTED, True),
    "cohere": Family(_DENSE, _GROUPED, defaults=_TIED),
    "cohere2": Family(_SLIDING, _SLIDES, of.dense, of.every("sliding_window_pattern", 4, SLIDING), True, _TIED),
    "deepseek_v3": _LATENT_EXPERTS,
    "falcon_h1": Family(f"{_MAMBA2} mamba_d_ssm|null", {FULL: of.falcon_h1}),
    "gemma2": Family(f"{_SLIDING} head_dim", _SLIDES, of.dense, _EVERY_OTHER, True, _GEMMA2_DEFAULTS, 4),
    "gemma3_text": Family(
        f"{_SLIDING} head_dim use_bidirectional_attention?",
        _SLIDES,
        of.dense,
        of.every("sliding_window_pattern", 6, SLIDING),
        True,
        _GEMMA3_DEFAULTS,
        4,
    ),
    "gemma4_text": Family(_GEMMA4, _GEMMA4_MIXERS, of.gemma4_mlp, _SIXTH_AND_LAST, True, _GEMMA4_DEFAULTS, 4),
    "glm4": Family(_DENSE, _GROUPED, num_norms=4),
    "glm4_moe": Family(_ROUTED, _GROUPED, of.routed, defaults=_FIRST_DENSE),
    "glm4_moe_lite": _LATENT_EXPERTS._replace(defaults=_FIRST_DENSE),
    "gpt_oss": Family(f"{_LOCAL} {_SLIDING} head_dim", _SLIDES, of.experts, _EVERY_OTHER, True),
    "granite": Family(_DENSE, _GROUPED),
    "granitemoe": Family(_LOCAL, _GROUPED, of.experts),
    "granitemoehybrid": Family(
        f"{_MAMBA2} num_local_experts>=0 num_experts_per_tok>=0 shared_intermediate_size",
        _STATES,
        of.granite_mlp,
        _LINEAR,
        True,
    ),
    "jamba": Family(_JAMBA, {FULL: of.grouped, LINEAR: of.mamba}, of.jamba_mlp, _ONE_OF_PERIOD),
    "kimi_k2": _LATENT_EXPERTS,
    "kimi_linear": Family(
        f"{_LATENT} linear_conv_kernel_dim linear_head_dim linear_num_heads",
        {FULL: of.latent, LINEAR: of.kimi_delta},
        of.routed,
        _FOURTH_BUT_FIRST,
        True,
        _FIRST_DENSE,
    ),
    "lfm2": Family(f"{_LFM2} {_LFM2_WIDTH}", _CONVOLUTIONS, of.lfm2_mlp, _LISTED_OR_ALL, True, _LFM2_DEFAULTS),
    "lfm2_moe": Family(
        f"{_LFM2} {_EXPERTS} num_dense_layers>=0", _CONVOLUTIONS, of.lfm2_mlp, _LISTED_OR_ALL, True, _TIED_NORMED
    ),
    "llama": Family(_DENSE, _GROUPED),
    "llama4_text": Family(_LLAMA4, _CHUNKS, of.llama4_mlp, of.either(CHUNKED, FULL, of.rotates), True, _NORMED),
    "mamba2": Family(
        f"{_ALL} {_PURE_MAMBA2}", {LINEAR: partial(of.mamba2, names=_PURE_MAMBA2)}, of.nothing, _LINEAR, num_norms=1
    ),
    "minimax_m2": Family(f"{_LOCAL} head_dim", _GROUPED, of.experts, defaults=_NORMED),
    "ministral3": Family(f"{_DENSE} head_dim {_WINDOW}", _SLIDES, of.dense, _ALL_SLIDE),
    "mistral": Family(f"{_DENSE} {_WINDOW}", _SLIDES, of.dense, _ALL_SLIDE, defaults=_WINDOWED),
    "mixtral": Family(f"{_LOCAL} {_WINDOW}", _SLIDES, of.experts, _ALL_SLIDE),
    "nemotron_h": Family(_NEMOTRON, _ONE_OF_FOUR, of.nothing, _LINEAR, True, num_norms=1),
    "olmo2": Family(_DENSE, _GROUPED, defaults=_WIDE),
    "olmo3": Family(_SLIDING, _SLIDES, of.dense, _EVERY_FOURTH, True, _WIDE),
    "olmo_hybrid": Family(
        f"{_DENSE} {_DELTA}", {FULL: of.grouped, LINEAR: of.delta_rule}, of.dense, of.every("", 4, LINEAR), True, _WIDE
    ),
    "phi3": Family(f"{_DENSE} {_WINDOW}", _SLIDES, of.dense, _ALL_SLIDE),
    "qwen2": Family(f"{_DENSE} {_WINDOW}", _SLIDES, of.dense, _LATER_SLIDE, True, _WINDOWED),
    "qwen2_moe": Family(
        f"{_QWEN_MOE} {_WINDOW} {_SHARED}", _SLIDES, of.qwen_experts, _FIRST_EVEN_SLIDE, True, _WINDOWED
    ),
    "qwen3": Family(f"{_DENSE} head_dim {_WINDOW}", _SLIDES, of.dense, _LATER_SLIDE, True, _WINDOWED_NORMED),
    "qwen3_5_moe_text": _QWEN_HYBRID_MOE,
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_moe": Family(f"{_QWEN_MOE} {_WINDOW}", _SLIDES, of.qwen_experts, _USED_SLIDE, defaults=_WINDOWED_NORMED),
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
