"""Names of models: the shapes that come with chunkplan, and where others are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chunkplan.cost.model_config import find_config, read_model_config
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan.errors import UsageError
from tests.support.places import ROOT

CONFIGS = json.loads((ROOT / "chunkplan" / "cost" / "models.json").read_text())

#: Parameters as published, by what a name begins with: those of the weights on the Hugging Face Hub, a head that is
#: tied to the embeddings counted once, of models that see pictures those of the text (arXiv 2503.19786), of DeepSeek-V3
#: those of arXiv 2412.19437 and of GLM-4.5 what transformers counts. The longest beginning counts.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-Next-80B-A3B": 79_674_391_296,
    "meta-llama/Llama-2-7b": 6_738_415_616,
    "meta-llama/Llama-2-13b": 13_015_864_320,
    "meta-llama/Llama-2-70b": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.3-70B": 70_553_706_496,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "deepseek-ai/DeepSeek-V3": 671_026_404_352,
    "deepseek-ai/DeepSeek-R1": 671_026_404_352,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.2": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "mistralai/Mistral-Small-24B": 23_572_403_200,
    "mistralai/Mixtral-8x7B": 46_702_792_704,
    "mistralai/Mixtral-8x22B": 140_630_071_296,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-1b": 999_885_952,
    "google/gemma-3-4b": 3_880_263_168,
    "google/gemma-3-12b": 11_766_034_176,
    "google/gemma-3-27b": 27_009_346_304,
    "microsoft/Phi-3-mini": 3_821_079_552,
    "microsoft/Phi-3.5-mini": 3_821_079_552,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini": 3_836_021_760,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "zai-org/GLM-4-9B": 9_400_279_040,
    "zai-org/GLM-4-32B": 32_566_087_680,
    "zai-org/GLM-4.5": 352_796_472_320,
    "zai-org/GLM-4.5-Air": 106_851_586_048,
    "tiiuae/Falcon3-3B": 3_227_655_168,
    "tiiuae/Falcon3-7B": 7_455_550_464,
    "tiiuae/Falcon3-10B": 10_305_653_760,
    "01-ai/Yi-1.5-6B": 6_061_035_520,
    "01-ai/Yi-1.5-9B": 8_829_407_232,
    "01-ai/Yi-1.5-34B": 34_388_917_248,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shape_that_comes_with_chunkplan_has_the_parameters_of_its_model(name: str) -> None:
    """Norms, biases, sinks and routers are left out of a shape."""
    published = PUBLISHED[max((each for each in PUBLISHED if name.startswith(each)), key=len)]
    shape = read_model_config(name)
    assert 0.996 * published < shape.num_parameters <= 1.0005 * published
    assert shape.max_positions and shape.max_positions >= 4096
    assert shape.name == name.partition("/")[2]


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in CONFIGS if "DeepSeek" not in name])
def test_transformers_counts_exactly_the_parameters_published(name: str) -> None:
    torch = pytest.importorskip("torch", reason="a model is built on its meta device")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = CONFIGS[name]
    published = PUBLISHED[max((each for each in PUBLISHED if name.startswith(each)), key=len)]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.get("text_config", config)))
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(published, rel=1e-4)


def test_the_default_is_the_model_of_its_name_in_any_case_and_without_who_published_it() -> None:
    found = read_model_config("Qwen/Qwen2.5-7B")
    assert found == read_model_config("qwen2.5-7b")
    assert (found.kinds, found.order, found.name) == (QWEN2_5_7B.kinds, QWEN2_5_7B.order, QWEN2_5_7B.name)


def test_a_file_that_is_there_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Qwen2.5-7B").mkdir()
    Path("Qwen2.5-7B/config.json").write_text(json.dumps(CONFIGS["Qwen/Qwen2.5-3B"]))
    assert read_model_config("Qwen2.5-7B").num_layers == 36
    assert find_config("Qwen2.5-7B")[1:] == ("Qwen2.5-7B/config.json", "")


def test_another_name_is_found_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As huggingface_hub lays it out."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model, commit = tmp_path / "models--mine--tuned-3b", "0" * 40
    for folder in ("refs", f"snapshots/{commit}"):
        (model / folder).mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    (model / "snapshots" / commit / "config.json").write_text(json.dumps(CONFIGS["Qwen/Qwen2.5-3B"]))
    shape = read_model_config("mine/tuned-3b")
    assert (shape.name, shape.num_layers) == ("tuned-3b", 36)


def test_an_unknown_name_is_a_usage_error_with_close_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    for name, close in {"qwen/qwen2.5-8b": "Qwen/Qwen2.5-7B", "llama-3.1-9b": "meta-llama/Llama-3.1-8B"}.items():
        with pytest.raises(UsageError, match=r"^[^ ]+: no such file or folder, and the name is not among") as caught:
            read_model_config(name)
        assert f"did you mean {close}, " in caught.value.hint
