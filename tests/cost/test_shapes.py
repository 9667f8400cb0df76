"""Shapes of models, read from the config.json that they were published with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chunkplan.cost.model_config import read_model_config
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan.errors import DataError, UsageError
from tests.support.published_models import CONFIGS

QWEN2_5_CONFIG = CONFIGS["Qwen2.5-7B"]


def written(tmp_path: Path, config: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_a_folder_and_its_file_are_the_same_model_and_the_default_is_it(tmp_path: Path) -> None:
    """The name tells family and size, and not where the file lies."""
    path = written(tmp_path, QWEN2_5_CONFIG)
    shape = read_model_config(path)
    assert shape == read_model_config(str(tmp_path))
    assert shape.name == "qwen2 7.6B"
    assert shape == replace(QWEN2_5_7B, name="qwen2 7.6B")


def test_newer_names_of_experts_are_known(tmp_path: Path) -> None:
    config = dict(CONFIGS["Qwen3-30B-A3B"])
    before = read_model_config(written(tmp_path, config))
    config["num_local_experts"] = config.pop("num_experts")
    assert read_model_config(written(tmp_path, config)) == before


def test_layers_that_are_no_mixtures_of_experts_among_others_are_known(tmp_path: Path) -> None:
    config = CONFIGS["Qwen3-30B-A3B"]
    shape = read_model_config(written(tmp_path, config | {"mlp_only_layers": [0, 3]}))
    assert [shape.kinds[place].experts_per_token for place in shape.order[:5]] == [0, 8, 8, 0, 8]


def test_the_refusal_of_a_type_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_model_config(written(tmp_path, {"model_type": "gpt2"}))
    assert caught.value.message == "the times and the memory of a 'gpt2' model are not known"
    assert "llama, llama4, llama4_text, mamba2, minimax_m2, ministral3, mistral, mistral3, mixtral" in caught.value.hint


def test_a_path_without_a_config_is_a_usage_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json", "bad\0path"):
        with pytest.raises(UsageError, match=r"no config\.json"):
            read_model_config(path)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

#: What a config says of positions -> how many tokens the model takes, for the planner and for the trainer.
POSITIONS: list[tuple[dict[str, Any], int | None]] = [
    ({"max_position_embeddings": 32768}, 32768),
    ({"max_position_embeddings": 32768, "rope_scaling": None}, 32768),
    ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
    ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 2}}, 65536),
    ({"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072),  # with what it is stretched to
    ({"max_position_embeddings": 200000, "rope_parameters": {**YARN, "rope_theta": 1e6}}, 200000),
    ({"max_position_embeddings": 16384, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 16384),
    ({"max_position_embeddings": 16384, "use_sliding_window": False, "sliding_window": 4096}, 16384),
]


@pytest.mark.parametrize(("says", "positions"), [*POSITIONS, ({}, None), ({"max_position_embeddings": None}, None)])
def test_a_model_takes_the_positions_that_its_config_says(says: Any, positions: int | None, tmp_path: Path) -> None:
    assert read_model_config(written(tmp_path, QWEN2_5_CONFIG | says)).max_positions == positions


def test_the_trainer_goes_by_the_same_positions(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the trainer needs it")
    from chunkplan_runtime.models.checks import max_positions
    from chunkplan_runtime.models.model import read_config

    for says, positions in POSITIONS:
        assert max_positions(read_config(written(tmp_path, QWEN2_5_CONFIG | says))) == positions


STRANGE = [None, "28", -1, 0, 1.5, float("nan"), float("inf"), True, [28], {"a": 1}, 10**30, 2**31]


@pytest.mark.parametrize(
    "says",
    [
        *({"max_position_embeddings": value} for value in STRANGE if value is not None),
        *({"rope_scaling": value} for value in ("yarn", [YARN], 3)),
        *({"rope_parameters": YARN | {"factor": value}} for value in STRANGE if value not in (None, 1.5, {"a": 1})),
        {"rope_scaling": YARN | {"original_max_position_embeddings": "32768"}},
        {"rope_parameters": {"full_attention": YARN | {"factor": "4"}}},
    ],
    ids=repr,
)
def test_strange_positions_are_named_with_their_file(says: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, QWEN2_5_CONFIG | {"max_position_embeddings": 32768} | says)
    with pytest.raises(DataError, match=f"`{next(iter(says))}` is") as caught:
        read_model_config(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("entry", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_strange_entries_are_named_with_their_file(entry: str, value: Any, tmp_path: Path) -> None:
    path = written(tmp_path, QWEN2_5_CONFIG | {entry: value})
    with pytest.raises(DataError, match=f"`{entry}` is") as caught:
        read_model_config(path)
    assert caught.value.where == str(path)


OPTIONAL = {
    "num_key_value_heads",
    "tie_word_embeddings",
    "sliding_window",
    "use_sliding_window",
    "decoder_sparse_step",
    "mlp_only_layers",
}


@pytest.mark.parametrize("name", ["Llama-3-8B", "Qwen3-8B", "Qwen3-30B-A3B", "Qwen2-57B-A14B", "Mixtral-8x7B"])
def test_an_entry_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    mixture = {"intermediate_size", "head_dim"} if name.startswith("Qwen") and "num_experts" in config else set()
    for entry in config.keys() - OPTIONAL - mixture - {"model_type"}:
        path = written(tmp_path, {key: config[key] for key in config.keys() - {entry}})
        with pytest.raises(DataError, match=f"`{entry}` is missing"):
            read_model_config(path)


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2]", '"qwen2"', "NaN", '{"model_type": 3}', "[" * 100_000, "9" * 5000, "\ud800"]
)
def test_a_file_that_is_no_config_is_a_data_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(DataError) as caught:
        read_model_config(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("entry", "value"), [("num_attention_heads", 27), ("num_key_value_heads", 5), ("num_key_value_heads", 29)]
)
def test_heads_that_do_not_fit_together_are_refused(entry: str, value: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"`{entry}` is {value}, expected a divisor of"):
        read_model_config(written(tmp_path, QWEN2_5_CONFIG | {entry: value}))


def test_a_token_goes_to_no_more_experts_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="`num_experts_per_tok` is 9"):
        read_model_config(written(tmp_path, CONFIGS["Mixtral-8x7B"] | {"num_experts_per_tok": 9}))
