"""A model's shape from the `config.json` that comes with its weights on Hugging Face, or by the model's name there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from chunkplan.cost.model_families import FAMILIES, TEXT_TYPES, Family
from chunkplan.cost.model_layers import EXPERTS, FULL, LINEAR, MLP, SLIDING, Config
from chunkplan.cost.shape import Layer, ModelShape, kinds_and_order
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

#: The types that are known, by name.
KNOWN_TYPES = sorted({*FAMILIES, *TEXT_TYPES})

_NAMES = Domain(
    lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value), "a list of names"
)

#: Entries that configs of all families may have.
_FOR_ALL: dict[str, Expected] = {
    "tie_word_embeddings?": FLAG,
    "max_position_embeddings?": or_null(_SIZE),
    "rope_scaling?": or_null(_ROPE),
    "rope_parameters?": or_null(_ROPE),
    "layer_types?": or_null(_NAMES),
}

#: Names that mean the same, first the one that layers are built with.
_SYNONYMS = (
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    ("n_shared_experts", "num_shared_experts"),
    ("max_position_embeddings", "model_max_length"),
    ("head_dim", "attention_head_dim"),
    ("layer_types", "layers_block_type"),
    ("tie_word_embeddings", "tie_embedding"),
    ("intermediate_size", "block_ff_dim"),
    ("n_groups", "mamba_n_groups"),
)
_SAME_AS = {name: names for names in _SYNONYMS for name in names}

#: Names of types of layers that configs have from earlier versions of transformers, and by letter.
_TYPES = {"attention": FULL, "mamba": LINEAR, "M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}

#: What Kimi Linear says in `linear_attn_config`, and the entries that it stands for.
_KIMI = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


#: Of a model on the Hugging Face Hub, with or without who published it.
_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?", re.ASCII)


def read_model_config(source: Path | str) -> ModelShape:
    """The shape of the model that a `config.json`, the folder that holds one, or a name means; see `find_config`.

    Example: `chunkplan.read_model_config("Qwen/Qwen2.5-7B")`

    Of a model that sees pictures too it is that of its `text_config`. Of a file its name says the type and the size, so
    that it is the same wherever the file lies.

    Raises:
        UsageError: there is no such file or model, or it is of another kind.
        DataError: the file is damaged, or an entry is missing or not what it should be.
    """
    config, where, name = find_config(source)
    shape = shape_of_config(config, where)
    return replace(shape, name=name) if name else shape


def find_config(source: Path | str) -> tuple[Any, str, str]:
    """A model's config, where errors say that it is, and the name that was given for it, "" of a file.

    A `Path` is that of a config.json or its folder. A text that is no such path is a name: of a shape in models.json
    beside this module, also without who published it, else on the Hugging Face Hub or in its cache.

    Raises:
        UsageError: there is no such file or model.
        DataError: the file is damaged.
    """
    file, name = config_file(Path(source)), ""
    if isinstance(source, str) and not Path(source).exists() and _NAME.fullmatch(source) and file.suffix != ".json":
        found = _shipped().get(source.lower())
        if found:
            return found[1], found[0], found[0].rpartition("/")[2]
        file, name = _file_on_hub(source), source.rpartition("/")[2]
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{source}: no config.json that can be read",
            hint="give a config.json, the folder of a model, or a name such as Qwen/Qwen2.5-7B",
        ) from error
    try:
        return json.loads(content), str(file), name
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a JSON file: {error}", where=str(file), hint=_HINT) from error


@cache
def _shipped() -> dict[str, tuple[str, Config]]:
    """Names and configs of models.json by their names in lower case, each with and without who published it."""
    configs = json.loads((files("chunkplan.cost") / "models.json").read_text(encoding="utf-8"))
    names = {key: name for name in configs for key in (name.lower(), name.lower().rpartition("/")[2])}
    return {key: (name, configs[name]) for key, name in names.items()}


def _file_on_hub(name: str) -> Path:
    """The config.json of a model in the cache of the Hugging Face Hub, or else fetched from there."""
    message = f"{name}: no such file or folder, and the name is not among those that come with chunkplan"
    if "/" in name:
        from huggingface_hub import constants, get_session, hf_hub_download, try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        try:
            get_session().head(constants.ENDPOINT, timeout=5)  # the download itself would try for half a minute
            return Path(hf_hub_download(name, "config.json"))
        except Exception as error:  # of the network, by whichever library it is reached: there is no common class
            message += f"; the Hugging Face Hub says: {(str(error) or type(error).__name__).strip().splitlines()[0]}"
    names = [found[0] for found in _shipped().values()]
    by_end = {each.rpartition("/")[2].lower(): each for each in names}
    close = get_close_matches(name.rpartition("/")[2].lower(), by_end, n=3, cutoff=0.6)
    hint = f"did you mean {', '.join(by_end[each] for each in close)}? Or give" if close else "give"
    raise UsageError(message, hint=f"{hint} the model's config.json, its folder, or its name on the Hub")


def config_file(path: Path) -> Path:
    """The `config.json` that is meant by a path: that of a folder, else the file itself."""
    return path / "config.json" if path.is_dir() else path


def shape_of_config(config: Any, where: str) -> ModelShape:
    """The shape of the model that a `config.json` describes, once it is read; `where` names it in errors.

    Raises:
        UsageError: it describes a model of another kind.
        DataError: an entry is missing or not what it should be.
    """
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str):
        raise DataError("there is no `model_type`, or it is not a string", where=where, hint=_HINT)
    text_type = model_type
    if model_type in TEXT_TYPES:
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise DataError("`text_config` is missing, or it is no object", where=where, hint=_HINT)
        own_type = text.get("model_type")
        text_type = own_type if isinstance(own_type, str) else TEXT_TYPES[model_type]
        config = {name: config[name] for name in ("tie_word_embeddings",) if name in config} | text
    if text_type not in FAMILIES:
        raise UsageError(
            f"the times and the memory of a {text_type[:60]!r} model are not known",
            where=where,
            hint=f"give the config.json of a model like it; the known types are {', '.join(KNOWN_TYPES)}",
        )
    family = FAMILIES[text_type]
    expected = family.expected() | _FOR_ALL
    config = _renamed({**family.defaults, **_prepared(config, text_type)}, expected, where)
    _check_heads(config, expected, where)
    types = _types_of(config, text_type, family, where)
    try:
        layers = [Layer(**family.layer(config, kind, place)) for place, kind in enumerate(types)]
    except KeyError as error:  # an entry that only some models of the type need
        raise DataError(f"`{error.args[0]}` is missing", where=where, hint=_HINT) from error
    kinds, order = kinds_and_order(layers)
    shape = ModelShape(
        name=model_type,
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        kinds=kinds,
        order=order,
        tied_embeddings=config.get("tie_word_embeddings", False),
        max_positions=max_positions(config),
    )
    size = shape.num_parameters / 1e6
    return replace(shape, name=f"{model_type} {f'{size / 1e3:.1f}B' if size >= 50 else f'{size:.2g}M'}")


def max_positions(config: Mapping[str, Any]) -> int | None:
    """The longest sequence of a model with this config.json, in tokens; None if it has no such entry.

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
    """The rope parameters of all layers; models with several kinds of layers have them by kind."""
    by_kind = [entry for entry in parameters.values() if isinstance(entry, Mapping)]
    return by_kind or [parameters]


def _prepared(config: Config, model_type: str) -> Config:
    """A config that says of its layers what others do, where it has a way of its own."""
    if model_type == "nemotron_h":
        pattern = config.get("hybrid_override_pattern")
        types = (
            list(pattern) if isinstance(pattern, str) else config.get("layer_types", config.get("layers_block_type"))
        )
        if isinstance(types, list):
            return {**config, "layer_types": types, "num_hidden_layers": len(types)}
    linear = config.get("linear_attn_config")
    if model_type == "kimi_linear" and isinstance(linear, dict):
        config = {**config, **{own: linear[name] for name, own in _KIMI.items() if name in linear}}
        full, num_layers = linear.get("full_attn_layers"), config.get("num_hidden_layers")
        if isinstance(full, list) and type(num_layers) is int and num_layers <= 100_000:
            return {**config, "layer_types": [FULL if place + 1 in full else LINEAR for place in range(num_layers)]}
    return config


def _renamed(config: Config, expected: Mapping[str, Expected], where: str) -> Config:
    """The entries of a config that are not null, each `expected` one by the name that layers are built with.

    Raises:
        DataError: an entry is missing or not what it should be.
    """
    stated, found = {}, {}
    for entry, domain in expected.items():
        name = entry.removesuffix("?")
        names = _SAME_AS.get(name, (name,))
        spelled = next((each for each in (name, *names) if each in config), name)
        stated[spelled + entry[len(name) :]] = domain
        found[names[0]] = config.get(spelled)
    if mismatch := find_mismatch(config, stated):
        raise DataError(mismatch, where=where, hint=_HINT)
    return {name: value for name, value in {**config, **found}.items() if value is not None}


def _types_of(config: Config, model_type: str, family: Family, where: str) -> list[str]:
    """The type of each layer, first to last."""
    usual = [family.type_of(config, place) for place in range(config["num_hidden_layers"])]
    types = [_TYPES.get(each, each) for each in config.get("layer_types", usual)]
    for name, listed in (("layer_types", types), ("mlp_layer_types", config.get("mlp_layer_types") or usual)):
        if len(listed) != len(usual):
            raise DataError(
                f"`{name}` is a list of {len(listed)} layers, `num_hidden_layers` is {len(usual)}",
                where=where,
                hint=_HINT,
            )
    if unknown := sorted(set(types) - set(family.mixers)):
        raise UsageError(
            f"layers of type {unknown[0][:60]!r}, which are not known of a {model_type} model",
            where=where,
            hint=f"known are {', '.join(family.mixers)}",
        )
    if types != usual and not family.has_types:
        raise UsageError(
            f"`layer_types` has layers of other types than those of a {model_type} model, which does not go by it",
            where=where,
            hint="leave layer_types out if that is what you want",
        )
    is_off = family.has_types and "use_sliding_window" in family.entries and not config.get("use_sliding_window")
    if SLIDING in types and (is_off or not config.get("sliding_window")):
        raise UsageError(
            "layers with a sliding window, and no window is given",
            where=where,
            hint="give sliding_window in tokens, and use_sliding_window: true where the model has it",
        )
    return types


def _check_heads(config: Config, expected: Mapping[str, Expected], where: str) -> None:
    """Refuse heads that do not divide one another, and more experts of a token than there are."""
    if "num_attention_heads" not in expected:
        return
    has_width = bool(config.get("head_dim")) or "qk_nope_head_dim" in expected
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    sent, num_experts = config.get("num_experts_per_tok") or 0, config.get("num_experts") or 0
    for name, value, fits, wanted in (
        ("num_attention_heads", heads, has_width or hidden % heads == 0, f"a divisor of {hidden}"),
        ("num_key_value_heads", kv_heads, heads % kv_heads == 0, f"a divisor of {heads}"),
        ("num_experts_per_tok", sent, sent <= num_experts or not num_experts, "no more than there are experts"),
    ):
        if not fits:
            raise DataError(f"`{name}` is {value}, expected {wanted}", where=where, hint=_HINT)
