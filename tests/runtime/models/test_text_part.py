"""Of a model of text and more, the language model is trained."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from chunkplan.errors import DataError, UsageError
from chunkplan_runtime.models.checks import check_config
from chunkplan_runtime.models.model import load_model, read_config
from chunkplan_runtime.models.parts import decoder_of
from chunkplan_runtime.models.tiny import tiny_document

#: By how the weights of the language model are named in a checkpoint of the whole.
TYPES = ("gemma3", "qwen3_5", "llama4", "mistral3")


def whole_model(model_type):
    tied = {"tie_word_embeddings": False} if model_type in ("qwen3_5", "llama4") else {}
    document = AutoConfig.for_model(model_type, **tied).to_dict()
    parts = {name: tiny_document(value) for name, value in document.items() if name.endswith("_config")}
    if "vision_config" in parts:
        parts["vision_config"] |= {"image_size": 28, "patch_size": 14, "num_position_embeddings": 16, "depth": 1}
        parts["vision_config"] |= {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(AutoConfig.for_model(**document | parts))


@pytest.mark.parametrize("model_type", TYPES)
def test_the_language_model_has_the_weights_that_it_has_in_the_whole(model_type, tmp_path):
    whole = whole_model(model_type)
    whole.save_pretrained(tmp_path / "whole")
    config = read_config(str(tmp_path / "whole"))
    assert config.model_type == whole.config.text_config.model_type
    model = load_model(str(tmp_path / "whole"), config, torch.float32)
    expected = {name.removeprefix("model."): weight for name, weight in decoder_of(whole).named_parameters()}
    found = dict(decoder_of(model.model).named_parameters())
    assert found and all(torch.equal(weight, expected[name]) for name, weight in found.items())
    head = (whole.language_model if model_type == "llama4" else whole).get_output_embeddings()
    assert torch.equal(model.model.get_output_embeddings().weight, head.weight)
    model.model.save_pretrained(tmp_path / "text")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert again.config.model_type == config.model_type
    assert all(
        torch.equal(weight, other) for weight, other in zip(model.model.parameters(), again.parameters(), strict=True)
    )


def test_weights_of_the_language_model_that_would_be_left_out_are_an_error(tmp_path):
    whole_model("gemma3").save_pretrained(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    save_file(load_file(file) | {"language_model.model.layers.0.more.weight": torch.ones(2)}, file, {"format": "pt"})
    config = read_config(str(tmp_path / "whole"))
    with pytest.raises(DataError, match=r"1 weights have no place in the model, the first is .*more.weight"):
        load_model(str(tmp_path / "whole"), config, torch.float32)


def test_a_whole_model_that_was_made_elsewhere_is_refused_by_name():
    with pytest.raises(UsageError, match="a gemma3 model is one of text and more"):
        check_config(AutoConfig.for_model("gemma3"), "model")
    with pytest.raises(UsageError, match="a bart model has an encoder"):
        check_config(AutoConfig.for_model("bart"), "model")


def test_a_config_without_a_type_of_model_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(DataError, match="`model_type` is missing"):
        read_config(tmp_path)
