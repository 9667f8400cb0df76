"""A small config of the same model class as a given one, with everything that it switches on: what a proof runs.

Widths, depths and counts become small, all the rest stays as it is. A config whose names are others than in most of
transformers is left as large as it is, or cannot be built, and then nothing is proved.
"""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from transformers import AutoConfig

from chunkplan_runtime.models.checks import EXPERTS_PER_TOKEN, MODEL_TYPES, NUM_EXPERTS
from chunkplan_runtime.models.parts import AUTO_MODEL, layers_of

#: Entries of a config, by name.
Entries = dict[str, Any]

#: Layers are kept until every kind of them has occurred, but never more than these.
MOST_LAYERS = 16

#: The size of heads; and which numbers are so small that sequences of a proof go beyond what they bound.
_HEAD_DIM = _SMALL = 16

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "lru_width")
_MLP_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "dff")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length")

#: Of a line, what other sizes become at most, of mixtures, latents, windows and recurrent layers; a size of 0 or None
#: stays. What changes from a length on becomes so short that a sequence of a proof goes beyond it.
_SIZES = """
1 topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers
2 n_group num_expert_group zero_expert_num index_n_heads index_topk_blocks linear_num_key_heads num_query_groups
4 index_topk index_block_size linear_num_value_heads linear_num_heads
8 hidden_size_per_layer_input laurel_rank qk_nope_head_dim qk_rope_head_dim index_head_dim keep_window_size floor_scale
8 log_scaling_n_floor rel_extent sliding_window sliding_window_size attention_window_size window_size adapter_rank
8 attention_chunk_size linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state block_size rotary_dim
8 mamba_chunk_size ssm_state_size state_size time_step_rank mamba_dt_rank chunk_size
12 v_head_dim
16 router_hidden_size moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size
16 moe_shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size q_lora_rank kv_lora_rank
16 original_max_position_embeddings local_attention kv_channels mamba_headdim
32 attention_head_dim
48 intermediate_size_mlp dense_intermediate_size
64 vocab_size vocab_size_per_layer_input unpadded_vocab_size attention_hidden_size
128 mamba_d_ssm
"""
_AT_MOST = dict.fromkeys(EXPERTS_PER_TOKEN, 2)
for _most, *_names in map(str.split, _SIZES.strip().splitlines()):
    _AT_MOST |= dict.fromkeys(_names, int(_most))

#: Numbers that are no sizes of weights and change nothing at any length: scalings, what sizes are multiples of, and
#: second names of sizes (gpt-oss, LFM2).
_HARMLESS = """
query_pre_attn_scalar dim_model_base block_multiple_of seed ffn_round_up_to_multiple_of rope_theta rope_local_base_freq
factor beta_fast beta_slow attention_factor mscale mscale_all_dim low_freq_factor high_freq_factor conv_dim conv_dim_out
initial_context_length block_dim
"""
_KNOWN = {*_LAYERS, *_HEADS, *_KV_HEADS, *_WIDTHS, *_MLP_WIDTHS, *NUM_EXPERTS, *_POSITIONS}
_KNOWN |= {*_AT_MOST, *_HARMLESS.split()}


def unknown_numbers(tiny: Entries) -> list[str]:
    """Entries of a small config that are large still, and may be bounds that no short sequence reaches."""
    found = []
    for name, value in tiny.items():
        if str(name).endswith("2label"):
            continue
        if isinstance(value, dict):
            found += [f"{name}.{inner}" for inner in unknown_numbers(value)]
        numbers = value if isinstance(value, (list, tuple)) else [value]
        is_large = any(type(number) is int and number > _SMALL for number in numbers)
        if is_large and name not in _KNOWN and not str(name).endswith(("_token_id", "_token_index")):
            found.append(str(name))
    return found


def tiny_document(document: Entries) -> Entries:
    """The entries of a small config, for those of a whole one (`config.to_dict()`)."""
    tiny = {name: value for name, value in document.items() if name not in ("architectures", "transformers_version")}
    num_layers = _first(document, _LAYERS) or 2
    heads = _first(document, _HEADS) or 2
    kv_heads = _first(document, _KV_HEADS) or heads
    small_kv_heads = min(kv_heads, 2)
    small_heads = small_kv_heads * min(max(heads // kv_heads, 1), 2)
    small_layers = _kept_layers(document, num_layers)
    if num_shared := document.get("num_kv_shared_layers"):
        # Layers that have keys and values of earlier ones: of every kind, behind one of every kind that has its own.
        kinds = document.get("layer_types") or [""]
        own = max(kinds.index(kind) for kind in {*kinds}) + 1
        small_layers = min(max(small_layers, 2 * own), own + num_shared, MOST_LAYERS)
        tiny["num_kv_shared_layers"] = small_layers - own
    sizes = dict.fromkeys(_LAYERS, small_layers) | dict.fromkeys(_HEADS, small_heads)
    sizes |= dict.fromkeys(_KV_HEADS, small_kv_heads) | dict.fromkeys(_WIDTHS, small_heads * _HEAD_DIM)
    sizes |= dict.fromkeys(_MLP_WIDTHS, 48) | dict.fromkeys(NUM_EXPERTS, 4) | dict.fromkeys(_POSITIONS, 256)
    for name, value in document.items():
        if _is_size(value) and (name in sizes or name in _AT_MOST):
            tiny[name] = sizes.get(name) or min(value, _AT_MOST[name])
        if isinstance(value, (list, tuple)) and len(value) == num_layers:
            tiny[name] = [48] * small_layers if name in _MLP_WIDTHS else list(value[:small_layers])
        elif name.endswith(("_token_id", "_token_index")):
            ids = [min(each, 3) for each in value] if isinstance(value, (list, tuple)) else value
            tiny[name] = min(ids, 3) if type(ids) is int else ids
        elif name.endswith(("dropout", "dropout_prob", "pdrop")) and isinstance(value, float):
            tiny[name] = 0.0  # what is random cannot be compared
    if _is_size(document.get("head_dim")):
        tiny["head_dim"] = tiny.get("qk_rope_head_dim", _HEAD_DIM) if document.get("kv_lora_rank") else _HEAD_DIM
    if _is_size(document.get("qk_head_dim")):
        tiny["qk_head_dim"] = tiny.get("qk_nope_head_dim", 0) + tiny.get("qk_rope_head_dim", 0)
    for name in ("attn_config", "ffn_config"):
        if isinstance(document.get(name), dict):
            tiny[name] = tiny_document(document[name])
    if isinstance(layers := tiny.get("per_layer_config"), dict):  # by the index of a layer, what is otherwise in it
        kept = {layer: entries for layer, entries in layers.items() if int(layer) < small_layers}
        tiny["per_layer_config"] = {
            layer: {name: tiny.get(name, value) for name, value in entries.items()} for layer, entries in kept.items()
        }
    if isinstance(tiny.get("rope_parameters"), dict):
        tiny["rope_parameters"] = _tiny_rope(tiny["rope_parameters"])
    return tiny | _of_families(tiny, small_heads, small_layers)


def small_config_of(config: Any, max_positions: int) -> Any:
    """The config of a small model of the same class, with room for so many positions."""
    tiny = tiny_document(config.to_dict())
    tiny |= {name: max(tiny[name], max_positions) for name in _POSITIONS if _is_size(tiny.get(name))}
    return AutoConfig.for_model(**tiny)


def num_weights(config: Any) -> int:
    """The number of weights of a model with this config."""
    with torch.device("meta"):
        return sum(each.numel() for each in AUTO_MODEL.from_config(deepcopy(config)).parameters())


def returned_by_layers(config: Any) -> int | None:
    """The number of values that a layer of such a model returns; None: hidden states alone, or no model."""
    if config.model_type in MODEL_TYPES:
        return None
    found: list[Any] = []
    with torch.random.fork_rng(devices=[]), suppress(Exception):
        model = AUTO_MODEL.from_config(AutoConfig.for_model(**tiny_document(config.to_dict())))
        layers_of(model)[0].register_forward_hook(lambda *given: found.append(given[2]))
        with torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    return len(found[0]) if found and isinstance(found[0], tuple) else None


def _tiny_rope(entries: Entries) -> Entries:
    """Parameters of rotary embeddings, in which whatever depends on the length does so for a short one."""
    tiny = {name: _tiny_rope(value) if isinstance(value, dict) else value for name, value in entries.items()}
    for name, short in (("original_max_position_embeddings", 16), ("max_position_embeddings", 256)):
        if _is_size(tiny.get(name)):
            tiny[name] = short
    return tiny


def _of_families(tiny: Entries, heads: int, num_layers: int) -> Entries:
    """Entries that have to go with the others."""
    found: Entries = {}
    width = heads * _HEAD_DIM
    if "mamba_n_heads" in tiny:  # Mamba-2 beside attention: its heads have to be as wide together as it expands
        expanded = int(tiny.get("mamba_expand", 2) * width)
        found |= {"mamba_n_heads": expanded // 8, "mamba_d_head": 8, "mamba_n_groups": 1}
        found |= {"mamba_d_ssm": expanded} if "mamba_d_ssm" in tiny else {}
    if "mamba_num_heads" in tiny:
        found |= {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1}
    for name in ("mlp_only_layers", "full_attn_idxs", "moe_layers", "hybrid_layer_ids"):
        if isinstance(tiny.get(name), list):
            found[name] = [layer for layer in tiny[name] if layer < num_layers]
    if "expand" in tiny and "num_heads" in tiny:  # Mamba-2 alone
        found |= {"num_heads": int(tiny["expand"] * tiny["hidden_size"]) // tiny["head_dim"], "n_groups": 1}
    if "attention_hidden_size" in tiny:  # Zamba: attention to the hidden states beside the embeddings
        found |= {"attention_hidden_size": 2 * width, "attention_head_dim": 2 * _HEAD_DIM}
        found |= {"n_mamba_heads": 2 * heads if "mamba_headdim" in tiny else 2}
    if isinstance(tiny.get("num_attention_heads_per_layer"), list):
        found["num_attention_heads_per_layer"] = [heads] * num_layers
    for name in ("moe_layer_end_index", "max_window_layers"):
        if _is_size(tiny.get(name)):
            found[name] = min(tiny[name], num_layers - 1)
    return found


def _kept_layers(document: Entries, num_layers: int) -> int:
    """Number of layers until every kind has occurred, and at least two."""
    lists = [value for value in document.values() if isinstance(value, (list, tuple))]
    kinds = list(zip(*([str(kind) for kind in each] for each in lists if len(each) == num_layers > 1), strict=True))
    kept = next((index + 1 for index in range(len(kinds)) if {*kinds[: index + 1]} == {*kinds}), 2)
    hybrid = [index for index, kind in enumerate(document.get("layers_block_type") or ()) if kind == "hybrid"]
    if len(hybrid) > 1 and "attention_hidden_size" in document:  # Zamba: these have one attention between them
        kept = max(kept, hybrid[1] + 1)
    dense = min(_first(document, ("first_k_dense_replace", "num_dense_layers")) or 0, 1)
    return min(max(kept, 2 + dense), MOST_LAYERS, max(num_layers, 2))


def _first(document: Entries, names: tuple[str, ...]) -> int | None:
    return next((document[name] for name in names if _is_size(document.get(name))), None)


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0
