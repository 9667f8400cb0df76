"""Models that chunked execution is not exact for are refused by name; so are files that are not what they should be."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from chunkplan.errors import DataError, UsageError
from chunkplan_runtime.models.model import load_model, new_model, read_config
from chunkplan_runtime.parity import parity


@pytest.fixture
def config_file(tmp_path, tiny_config):
    def write(**changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(tiny_config(**changes)))
        return path

    return write


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3_moe", "output_router_logits": True}, "load-balancing loss"),
        ({"model_type": "no-such-model"}, "transformers [0-9.]+ has no model type 'no-such-model'"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window is -1"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True, "sliding_window": 8},
            "a sliding window that looks both ways",
        ),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention, of which"),
        ({"model_type": "gemma2", "sliding_window": None}, "a sliding window, and none is given"),
        (
            {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
            "a sliding window, and none is given",
        ),
        (
            {
                "model_type": "qwen3_moe",
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "full_attention and sliding_attention, which a qwen3_moe model .* every layer has its sliding window",
        ),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"] * 2},
            "has full_attention, which a mistral model .* every layer has its sliding window",
        ),
        (
            {"model_type": "llama", "sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
            "has sliding_attention, which a llama model .* every layer has full attention",
        ),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "factor": 2.0,
                    "original_max_position_embeddings": 16,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                }
            },
            "'longrope'",
        ),
        ({"rope_scaling": {"rope_type": "a new one"}}, "'a new one'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
    ],
)
def test_a_model_that_would_be_silently_wrong_is_refused_with_a_hint(config_file, changes, message):
    with pytest.raises(UsageError, match=message) as raised:
        read_config(config_file(**changes))
    assert raised.value.hint


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("rope", [None, {"rope_type": "linear", "factor": 2.0}])
def test_known_models_are_taken(config_file, model_type, rope):
    config = read_config(config_file(model_type=model_type, rope_scaling=rope))
    model = new_model(config, torch.bfloat16, seed=0).model
    assert model.config._attn_implementation == "chunkplan"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_model_stretched_by_yarn_takes_the_positions_that_it_is_stretched_to(config_file):
    """...and chunks of a sequence that long give the gradients of the whole."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    file = config_file(max_position_embeddings=16, rope_scaling=rope)
    assert parity([64, 5], 20, 1, file).passed
    with pytest.raises(UsageError, match="has 65 tokens, the model takes 64 positions"):
        parity([65], 20, 1, file)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"model_type": 3}', '{"model_type": "llama", "hidden_size": "wide"}', "\xff\xfe"]
)
def test_a_file_that_is_not_a_model_config_is_named(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(DataError) as raised:
        read_config(path)
    assert raised.value.where == str(path)


def test_a_config_that_cannot_be_built_is_an_error_of_the_data(config_file):
    with pytest.raises(DataError, match="cannot be built"):
        new_model(read_config(config_file(hidden_act="no such activation")), torch.float32, seed=0)


def test_a_config_is_given_as_its_file_or_its_folder(config_file):
    file = config_file()
    assert file.name == "config.json"
    assert read_config(file.parent).to_dict() == read_config(file).to_dict()


def test_a_missing_config_and_a_folder_without_one_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"there is no file .*nothing\.json"):
        read_config(tmp_path / "nothing.json")
    with pytest.raises(UsageError, match=r"there is no file .*config\.json"):
        read_config(str(tmp_path))
    with pytest.raises(UsageError, match=r"there is no folder .*nothing"):
        read_config(str(tmp_path / "nothing"))


def test_a_model_that_is_not_here_and_cannot_be_fetched_is_named(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="cannot get model 'no-such-organisation/no-such-model'") as raised:
        read_config("no-such-organisation/no-such-model")
    assert "folder" in raised.value.hint


def test_saved_weights_come_back_and_missing_ones_are_refused(tmp_path, config_file):
    model = new_model(read_config(config_file(model_type="qwen2")), torch.float32, seed=5).model
    model.save_pretrained(tmp_path / "saved")
    config = read_config(str(tmp_path / "saved"))
    loaded = load_model(str(tmp_path / "saved"), config, torch.float32).model
    assert all(torch.equal(mine, saved) for mine, saved in zip(loaded.parameters(), model.parameters(), strict=True))
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"1 weights .*layers\.1\.mlp\.up_proj"):
        load_model(str(tmp_path / "saved"), config, torch.float32)
    config.vocab_size += 1
    with pytest.raises(UsageError, match="cannot load model"):
        load_model(str(tmp_path / "saved"), config, torch.float32)
    (tmp_path / "saved" / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="cannot load model"):
        load_model(str(tmp_path / "saved"), config, torch.float32)
    (tmp_path / "saved" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UsageError, match="cannot load model"):
        load_model(str(tmp_path / "saved"), config, torch.float32)


def test_the_same_seed_gives_the_same_weights(config_file):
    config = read_config(config_file())
    first, second, third = (new_model(config, torch.float32, seed).model.lm_head.weight for seed in (7, 7, 8))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"head_dim": 0},
        {"hidden_size": 0},
        {"vocab_size": -1},
        {"num_hidden_layers": -1},
        {"pad_token_id": 97},
        {"dtype": "float13"},
        {"return_dict": False},
    ],
    ids=str,
)
def test_a_config_that_makes_no_model_is_refused(tiny_config, tmp_path, change):
    """With an error of ours, whichever of transformers' it would have been."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config("qwen2", **change)))
    with pytest.raises((UsageError, DataError)):
        new_model(read_config(path), torch.float32, seed=0)


def test_models_made_from_one_config_do_not_share_it(config_file):
    """Else setting the attention of one would have the other drop every prefix."""
    config = read_config(config_file())
    first, second = (new_model(config, torch.float32, 0) for _ in range(2))
    first.model.set_attn_implementation("sdpa")
    assert second.config._attn_implementation == "chunkplan"
    with pytest.raises(UsageError, match="attention is 'sdpa'"):
        first.hidden_states(None, None)


@pytest.mark.parametrize("written", ['{"__float__": "Infinity"}', "Infinity"])
def test_infinity_is_read_as_transformers_and_as_publishers_write_it(tmp_path, written):
    (tmp_path / "config.json").write_text(f'{{"model_type": "mamba2", "time_step_limit": [0.0, {written}]}}')
    assert read_config(tmp_path).time_step_limit == [0.0, float("inf")]
