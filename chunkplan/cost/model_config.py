"""A model's shape from the `config.json` that comes with its weights on Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from chunkplan.cost.shape import ModelShape, plain_layer
from chunkplan.domains import FLAG, Domain, Expected, find_mismatch, or_null, whole
from chunkplan.errors import DataError, UsageError

_HINT = "compare it with the config.json that the model was published with"
_SIZE = whole(1, 2**31 - 1)

#: Far beyond what stretches any model, and small enough that positions fit 64 bits.
_MOST_FACTOR = 1_000_000

_ROPE_ENTRY = {
    "factor?": or_null(
        Domain(lambda value: type(value) in (int, float) and 0 < value <= _MOST_FACTOR, "a number above 0")
    ),
    "original_max_position_embeddings?": or_null(_SIZE),
}
_ROPE = Domain(
    lambda value: isinstance(value, dict) and not any(find_mismatch(each, _ROPE_ENTRY) for each in rope_entries(value)),
    "an object whose `factor` is a number above 0 and whose `original_max_position_embeddings` is one from 1",
)

_ALL: dict[str, Expected] = {
    "hidden_size": _SIZE,
    "num_hidden_layers": whole(1, 100_000),
    "num_attention_heads": _SIZE,
    "num_key_value_heads?": or_null(_SIZE),
    "head_dim?": or_null(_SIZE),
    "vocab_size": _SIZE,
    "tie_word_embeddings?": FLAG,
    "sliding_window?": or_null(whole()),
    "use_sliding_window?": FLAG,
    "max_position_embeddings?": or_null(_SIZE),
    "rope_scaling?": or_null(_ROPE),
    "rope_parameters?": or_null(_ROPE),
}
_DENSE: dict[str, Expected] = {**_ALL, "intermediate_size": _SIZE}
_QWEN_MOE: dict[str, Expected] = {
    **_ALL,
    "num_experts": _SIZE,
    "num_experts_per_tok": _SIZE,
    "moe_intermediate_size": _SIZE,
    "decoder_sparse_step?": _SIZE,
    "mlp_only_layers?": Domain(lambda value: value is None or isinstance(value, list), "a list, or null"),
}
#: What the entries of each `model_type` have to be; one whose name ends in "?" may be missing.
_EXPECTED: dict[str, dict[str, Expected]] = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "mixtral": {**_DENSE, "num_local_experts": _SIZE, "num_experts": _SIZE, "num_experts_per_tok": _SIZE},
    "qwen2": _DENSE,
    "qwen2_moe": {**_QWEN_MOE, "shared_expert_intermediate_size": whole(0, 2**31 - 1)},
    "qwen3": {**_DENSE, "head_dim": _SIZE},
    "qwen3_moe": _QWEN_MOE,
}


def read_model_config(path: Path | str) -> ModelShape:
    """The shape of the model that a `config.json`, or the folder that holds one, describes.

    Dense models and mixtures of experts whose layers are all alike and attend to everything before them. The name says
    the family and the size, so that it is the same wherever the file lies.

    Raises:
        UsageError: there is no such file, or it describes a model of another kind.
        DataError: the file is damaged, or an entry is missing or not what it should be.
    """
    path = Path(path)
    try:
        file = config_file(path)
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: no config.json that can be read", hint="give a config.json, or the folder of a model"
        ) from error
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a JSON file: {error}", where=str(file), hint=_HINT) from error
    return shape_of_config(config, str(file))


def shape_of_config(config: Any, where: str) -> ModelShape:
    """The shape of the model that a `config.json` describes, once it is read; `where` names it in errors.

    Raises:
        UsageError: it describes a model of another kind.
        DataError: an entry is missing or not what it should be.
    """
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str):
        raise DataError("there is no `model_type`, or it is not a string", where=where, hint=_HINT)
    if model_type not in _EXPECTED:
        raise UsageError(
            f"the times and the memory of a {model_type[:60]!r} model are not known",
            where=where,
            hint=f"give the config.json of a model like it; the known types are {', '.join(_EXPECTED)}",
        )
    if "num_local_experts" in config:  # Mixtral's name, and some versions of transformers write it for Qwen too
        config = {**config, "num_experts": config["num_local_experts"]}
    if found := find_mismatch(config, _EXPECTED[model_type]):
        raise DataError(found, where=where, hint=_HINT)
    _refuse_uneven_layers(config, where)
    return _shape_of(config, where)


def config_file(path: Path) -> Path:
    """The `config.json` that is meant by a path: that of a folder, else the file itself."""
    return path / "config.json" if path.is_dir() else path


def max_positions(config: Mapping[str, Any]) -> int | None:
    """How many tokens a sequence may have for a model with this config.json; None where it does not say.

    That is `max_position_embeddings`. Where YaRN stretches rotary embeddings, it is what they are stretched to if that
    is more: some such configs state the positions that the model had before. A sliding window bounds how far a token
    sees, not where it may stand. The entries have to be what `read_model_config`, or transformers, checks.
    """
    stated: int | None = config.get("max_position_embeddings")
    if stated is None:
        return None
    most = stated
    for entry in rope_entries(config.get("rope_scaling") or config.get("rope_parameters") or {}):
        if entry.get("rope_type", entry.get("type")) == "yarn":
            original = entry.get("original_max_position_embeddings") or stated
            most = max(most, int((entry.get("factor") or 1) * original))
    return most


def rope_entries(parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of all layers; models with several kinds of layers have rope parameters by kind."""
    by_kind = [entry for entry in parameters.values() if isinstance(entry, Mapping)]
    return by_kind or [parameters]


def _refuse_uneven_layers(config: dict[str, Any], where: str) -> None:
    always_uses_it = config["model_type"] in ("mistral", "mixtral")
    windows = config.get("sliding_window") and config.get("use_sliding_window", always_uses_it)
    if windows or "sliding_attention" in str(config.get("layer_types")):
        raise UsageError(
            f"{where}: attention that sees a window only", hint="plan with a model whose layers see the whole sequence"
        )
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise UsageError(
            f"{where}: some layers are mixtures of experts and some are not",
            hint="plan with one whose layers are alike",
        )


def _shape_of(config: dict[str, Any], where: str) -> ModelShape:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    mlp_width, all_mlp_width, experts_per_token = _mlp_of(config)
    for name, value, fits, expected in (
        ("num_attention_heads", heads, bool(config.get("head_dim")) or hidden % heads == 0, f"a divisor of {hidden}"),
        ("num_key_value_heads", kv_heads, heads % kv_heads == 0, f"a divisor of {heads}"),
        ("num_experts_per_tok", experts_per_token, mlp_width <= all_mlp_width, "no more than there are experts"),
    ):
        if not fits:
            raise DataError(f"`{name}` is {value}, expected {expected}", where=where, hint=_HINT)
    layer = plain_layer(
        hidden,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        query_width=heads * head_dim,
        kv_width=kv_heads * head_dim,
        mlp_width=mlp_width,
        all_mlp_width=all_mlp_width,
        experts_per_token=experts_per_token,
    )
    shape = ModelShape(
        name=config["model_type"],
        hidden_size=hidden,
        vocab_size=config["vocab_size"],
        kinds=(layer,),
        order=(0,) * config["num_hidden_layers"],
        tied_embeddings=config.get("tie_word_embeddings", False),
        max_positions=max_positions(config),
    )
    return replace(shape, name=f"{shape.name} {shape.num_parameters / 1e9:.1f}B")


def _mlp_of(config: dict[str, Any]) -> tuple[int, int, int]:
    """The width of the MLP that a token passes through, the width in weights, and the experts that a token goes to."""
    entries = _EXPECTED[config["model_type"]]
    if "num_experts" not in entries:
        return config["intermediate_size"], config["intermediate_size"], 0
    expert = config["moe_intermediate_size" if "moe_intermediate_size" in entries else "intermediate_size"]
    shared = config["shared_expert_intermediate_size"] if "shared_expert_intermediate_size" in entries else 0
    experts_per_token = config["num_experts_per_tok"]
    return experts_per_token * expert + shared, config["num_experts"] * expert + shared, experts_per_token
