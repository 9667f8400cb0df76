"""A process reads its part of a saved model and nothing else, and parts are saved as the whole would be."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from chunkplan.errors import DataError
from chunkplan_runtime import tensor_file
from chunkplan_runtime.attention.kernels import Kernels
from chunkplan_runtime.distributed import own_part
from chunkplan_runtime.distributed.own_part import WholeOnlyError, load_own_part, own_rows
from chunkplan_runtime.distributed.stages import cut_stage, split_layers
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models.hollow import hollow, hollow_model
from chunkplan_runtime.models.model import CausalLM, load_model, new_model, read_pretrained_config
from chunkplan_runtime.models.tiny import tiny_document
from chunkplan_runtime.tensor_file import Kind, TensorFile, writing_tensors
from chunkplan_runtime.training.final import save_model
from tests.support.places import ROOT

CPU = torch.device("cpu")

#: Tied embeddings; experts that are one weight in the model and many in a checkpoint; buffers that are computed, by the
#: model itself from those of its layers, and such as are saved; weights that stay float32.
TYPES = ("qwen2", "mixtral")
OTHERS = (
    "falcon_h1",
    "deepseek_v3",
    "gemma3_text",
    "gpt_oss",
    "mamba2",
    "qwen3_next",
    "phi3",
    "olmo2",
    "jamba",
    "granitemoehybrid",
    "gpt2",
    "lfm2",
)


def saved(model_type: str, folder: Path, **changes: Any) -> Any:
    """The config of a small model in `folder`."""
    disable_progress_bar()
    document = tiny_document(AutoConfig.for_model(model_type, **changes).to_dict())
    new_model(AutoConfig.for_model(**document), torch.float32, 0).model.save_pretrained(folder)
    return read_pretrained_config(str(folder))


def part(folder: Path, config: Any, layout: RankLayout, dtype: torch.dtype = torch.float32) -> CausalLM:
    layers = split_layers(config.num_hidden_layers, layout.pp)
    return load_own_part(str(folder), config, dtype, layers, layout, kernels=Kernels(), device=CPU)[0]


@pytest.mark.parametrize("model_type", [*TYPES, *(pytest.param(each, marks=pytest.mark.soak) for each in OTHERS)])
def test_a_part_is_what_is_cut_from_the_whole_model(model_type: str, tmp_path: Path) -> None:
    config = saved(model_type, tmp_path / "saved")
    for dp, pp in ((1, 2), (3, 1), (2, 2)):
        for rank in range(dp * pp):
            layout = RankLayout(dp, pp, rank)
            own = part(tmp_path / "saved", config, layout, torch.bfloat16)
            whole = load_model(str(tmp_path / "saved"), config, torch.bfloat16)
            if pp > 1:
                whole = cut_stage(whole, split_layers(config.num_hidden_layers, pp), layout)
            found, expected = dict(own.model.named_parameters()), dict(whole.model.named_parameters())
            assert found.keys() == expected.keys()
            for name, weight in expected.items():
                here = own.rows[found[name]] if dp > 1 else found[name]
                mine = weight[own_rows(len(weight), layout)] if dp > 1 else weight
                assert torch.equal(here, mine) and here.dtype == mine.dtype, name
                assert found[name].shape == weight.shape
                assert here.untyped_storage().nbytes() == here.nbytes, "nothing else is held with it"
            buffers = dict(whole.model.named_buffers())
            assert all(torch.equal(value, buffers.pop(name)) for name, value in own.model.named_buffers())
            assert not buffers and type(own.model) is type(whole.model)


def test_a_process_reads_its_rows_of_its_layers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = saved("qwen2", tmp_path / "saved", tie_word_embeddings=False)
    read: dict[str, int] = {}
    original = TensorFile.read

    def counted(file: TensorFile, name: str, where: Any = ...) -> torch.Tensor:
        found = original(file, name, where)
        read[name] = read.get(name, 0) + found.nbytes
        return found

    monkeypatch.setattr(TensorFile, "read", counted)
    total: dict[str, int] = {}
    for rank in range(4):
        read.clear()
        part(tmp_path / "saved", config, RankLayout(dp=2, pp=2, process=rank))
        assert not any(name.startswith(f"model.layers.{1 - rank // 2}.") for name in read)
        for name, num_bytes in read.items():
            total[name] = total.get(name, 0) + num_bytes
    assert total == {name: each.nbytes for name, each in load_file(tmp_path / "saved" / "model.safetensors").items()}


def test_what_is_wrong_with_a_checkpoint_is_named_with_its_file(tmp_path: Path) -> None:
    config = saved("qwen2", tmp_path / "saved")
    file, second = tmp_path / "saved" / "model.safetensors", RankLayout(dp=2, pp=2, process=3)
    weights, name = load_file(file), "model.layers.1.mlp.up_proj.weight"

    def write(**changed: torch.Tensor) -> None:
        save_file({key: each for key, each in (weights | changed).items() if each.ndim}, file, {"format": "pt"})

    write(**{name: torch.zeros(())})  # left out
    with pytest.raises(DataError, match=rf"saved: 1 weights are missing, the first is {name}"):
        part(tmp_path / "saved", config, second)
    part(tmp_path / "saved", config, RankLayout(dp=2, pp=2, process=0))  # which has none of it
    write(**{name: weights[name][:-1]})
    with pytest.raises(DataError, match=rf"model.safetensors: {name} has the shape \[\d+, \d+\], the model has \["):
        part(tmp_path / "saved", config, second)
    write()
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"model.safetensors: cannot be read: "):
        part(tmp_path / "saved", config, second)


def test_a_checkpoint_with_both_of_two_weights_that_are_one_is_loaded_whole(tmp_path: Path) -> None:
    config = saved("qwen2", tmp_path / "saved", tie_word_embeddings=True)
    file = tmp_path / "saved" / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    with pytest.raises(WholeOnlyError, match=r"has both lm_head.weight and model.embed_tokens.weight"):
        part(tmp_path / "saved", config, RankLayout(dp=2))


def test_another_checkpoint_has_another_identity_however_it_is_split(tmp_path: Path) -> None:
    config = saved("qwen2", tmp_path / "one")
    load_model(str(tmp_path / "one"), config, torch.float32).model.save_pretrained(
        tmp_path / "split", max_shard_size="50KB"
    )
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, tmp_path / "other" / "model.safetensors", {"format": "pt"})

    def identity(name: str) -> str:
        paths = (tmp_path / name).glob("*.safetensors")
        return own_part._identity(own_part.open_files(paths, "hint"))

    assert len([*(tmp_path / "split").glob("*.safetensors")]) > 1
    assert identity("one") == identity("split") != identity("other")


@pytest.mark.parametrize("model_type", [*TYPES, *(pytest.param(each, marks=pytest.mark.soak) for each in OTHERS)])
def test_what_is_saved_in_pieces_is_to_the_byte_what_transformers_saves(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that a checkpoint has as they are some rows at a time, and others layer by layer."""
    at_once = 1 << 10
    monkeypatch.setattr(tensor_file, "_BYTES_AT_ONCE", at_once)
    config = saved(model_type, tmp_path / "saved")
    whole = load_model(str(tmp_path / "saved"), config, torch.bfloat16).model
    model, tensors, read_at_once = hollow_model(config, torch.bfloat16), whole.state_dict(), []
    largest: dict[str, int] = {}
    for name, weight in whole.named_parameters():
        model.get_parameter(name).data = hollow(weight).data
    model.generation_config, model._weight_conversions = whole.generation_config, whole._weight_conversions

    def read(some: dict[str, torch.Tensor], first: int = 0) -> None:
        read_at_once.append(len(some))
        for name, tensor in some.items():
            largest[name] = max(largest.get(name, 0), tensor.nbytes)
            tensor.copy_(tensors[name][first : first + len(tensor)] if tensor.dim() else tensors[name])

    stored = {name: Kind(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    half = f"{sum(tensor.nbytes for tensor in tensors.values()) // 2000}KB"
    for folder, most in (("one", "50GB"), ("split", half)):
        whole.save_pretrained(tmp_path / folder / "theirs", max_shard_size=most)
        save_model(model, stored, read, tmp_path / folder / "ours", most)
    theirs, ours = (
        {path.name: path.read_bytes() for path in (tmp_path / "one" / who).iterdir()} for who in ("theirs", "ours")
    )
    assert ours == theirs
    assert max(read_at_once) < len(tensors) / 1.5, "it goes layer by layer"
    embeddings = model.get_input_embeddings().weight
    [name] = [name for name, weight in model.named_parameters() if weight is embeddings]
    assert at_once / 2 < largest[name] <= at_once < tensors[name].nbytes
    again = load_model(str(tmp_path / "split" / "ours"), config, torch.bfloat16).model
    assert len([*(tmp_path / "split" / "ours").glob("*.safetensors")]) > 1
    assert all(torch.equal(each, tensors[name]) for name, each in again.state_dict().items())


def test_a_file_that_is_written_tensor_by_tensor_is_that_of_safetensors(tmp_path: Path) -> None:
    dtypes = (torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.float64)
    tensors = {f"a {dtype}": torch.arange(6).reshape(2, 3).to(dtype) for dtype in dtypes}
    tensors |= {"none": torch.empty(0, 4), "number": torch.tensor(2.5), "b": torch.ones(3)}
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    kinds = {name: Kind(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with writing_tensors(tmp_path / "ours", kinds, {"format": "pt"}) as file:
        for name in reversed([*tensors]):
            file.write(name, tensors[name])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    found = TensorFile(tmp_path / "ours", "hint")
    assert all(torch.equal(found.read(name), tensor) for name, tensor in tensors.items())
    assert torch.equal(found.read("b", slice(1, 3)), tensors["b"][1:3])
    assert torch.equal(found.read("a torch.float32", (slice(1, 2), slice(0, 2))), tensors["a torch.float32"][1:, :2])


@pytest.mark.soak
def test_a_process_needs_host_memory_for_its_share_and_little_more() -> None:
    """Loading and saving, on four processes, with fp32 master weights where they are sharded and where they are not."""
    program = [sys.executable, str(ROOT / "benchmarks" / "host_memory.py")]
    command = [*program, "--json", "--precision", "bf16", "--layers", "32"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert told.returncode == 0, told.stderr
    rows = json.loads(told.stdout)
    assert [(row["dp"], row["pp"]) for row in rows] == [(4, 1), (2, 2), (1, 4)]
    for row in rows:
        assert row["loaded / share"] <= 1.2 and row["saved / share"] <= 1.2, row
