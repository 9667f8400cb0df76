"""A process reads its part of a saved model and nothing else, and parts are saved as the whole would be."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from chunkplan.errors import DataError
from chunkplan_runtime.attention.kernels import Kernels
from chunkplan_runtime.distributed import stages
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.distributed.stages import (
    StoredTensor,
    WholeOnlyError,
    cut_stage,
    load_shard,
    rows_of,
    split_layers,
)
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models.model import load_model, meta_model, meta_weight, new_model, read_config
from chunkplan_runtime.models.tiny import tiny_document
from chunkplan_runtime.training.final import save_parts
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


def saved(model_type, folder, **changes):
    """The config of a small model in `folder`."""
    disable_progress_bar()
    document = tiny_document(AutoConfig.for_model(model_type, **changes).to_dict())
    new_model(AutoConfig.for_model(**document), torch.float32, 0).model.save_pretrained(folder)
    return read_config(str(folder))


def part(folder, config, layout, dtype=torch.float32):
    layers = split_layers(config.num_hidden_layers, layout.pp)
    return load_shard(str(folder), config, dtype, layers, layout, kernels=Kernels(), device=CPU)[0]


@pytest.mark.parametrize("model_type", [*TYPES, *(pytest.param(each, marks=pytest.mark.soak) for each in OTHERS)])
def test_a_part_is_what_is_cut_from_the_whole_model(model_type, tmp_path):
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
                mine = weight[rows_of(len(weight), layout)] if dp > 1 else weight
                assert torch.equal(here, mine) and here.dtype == mine.dtype, name
                assert found[name].shape == weight.shape
                assert here.untyped_storage().nbytes() == here.nbytes, "nothing else is held with it"
            buffers = dict(whole.model.named_buffers())
            assert all(torch.equal(value, buffers.pop(name)) for name, value in own.model.named_buffers())
            assert not buffers and type(own.model) is type(whole.model)


def test_a_process_reads_its_layers_only_and_holds_its_rows_of_them(tmp_path, monkeypatch):
    config = saved("qwen2", tmp_path / "saved", tie_word_embeddings=False)
    read = set()
    original = StoredTensor.__getitem__

    def noted(stored, where):
        if where is ...:  # no sample of it
            read.add(stored.name)
        return original(stored, where)

    monkeypatch.setattr(StoredTensor, "__getitem__", noted)
    held = 0
    for rank in range(4):
        read.clear()
        own = part(tmp_path / "saved", config, RankLayout(dp=2, pp=2, process=rank))
        assert read and not any(name.startswith(f"model.layers.{1 - rank // 2}.") for name in read)
        assert read == {name for name, weight in own.model.named_parameters() if weight in own.rows}
        held += sum(rows.nbytes for rows in own.rows.values())
    assert held == sum(each.nbytes for each in load_file(tmp_path / "saved" / "model.safetensors").values())


def test_what_is_wrong_with_a_checkpoint_is_named_with_its_file(tmp_path):
    config = saved("qwen2", tmp_path / "saved")
    file, second = tmp_path / "saved" / "model.safetensors", RankLayout(dp=2, pp=2, process=3)
    weights, name = load_file(file), "model.layers.1.mlp.up_proj.weight"

    def write(**changed):
        save_file({key: each for key, each in (weights | changed).items() if each.ndim}, file, {"format": "pt"})

    write(**{name: torch.zeros(())})  # left out
    with pytest.raises(DataError, match=rf"saved: 1 weights are missing, the first is {name}"):
        part(tmp_path / "saved", config, second)
    part(tmp_path / "saved", config, RankLayout(dp=2, pp=2, process=0))  # which has none of it
    write(**{name: weights[name][:-1]})
    with pytest.raises(DataError, match=rf"saved: {name} has the shape \[\d+, \d+\], the model has \["):
        part(tmp_path / "saved", config, second)
    write()
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"model.safetensors: cannot be read: "):
        part(tmp_path / "saved", config, second)


def test_a_checkpoint_with_both_of_two_weights_that_are_one_is_loaded_whole(tmp_path):
    config = saved("qwen2", tmp_path / "saved", tie_word_embeddings=True)
    file = tmp_path / "saved" / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    with pytest.raises(WholeOnlyError, match=r"has both lm_head.weight and model.embed_tokens.weight"):
        part(tmp_path / "saved", config, RankLayout(dp=2))


def test_another_checkpoint_has_another_identity_however_it_is_split(tmp_path):
    config = saved("qwen2", tmp_path / "one")
    load_model(str(tmp_path / "one"), config, torch.float32).model.save_pretrained(
        tmp_path / "split", max_shard_size="50KB"
    )
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, tmp_path / "other" / "model.safetensors", {"format": "pt"})

    def identity(name):
        paths = (tmp_path / name).glob("*.safetensors")
        return stages._identity(stages.open_files(paths))

    assert len([*(tmp_path / "split").glob("*.safetensors")]) > 1
    assert identity("one") == identity("split") != identity("other")


@pytest.mark.parametrize("model_type", [*TYPES, *(pytest.param(each, marks=pytest.mark.soak) for each in OTHERS)])
def test_what_is_saved_in_parts_is_what_transformers_saves(model_type, tmp_path):
    """Tensors with their names and dtypes, config and generation config; in one file or in several with an index."""
    config = saved(model_type, tmp_path / "saved")
    held = load_model(str(tmp_path / "saved"), config, torch.bfloat16).model
    whole = meta_model(config, torch.bfloat16)
    for name, weight in held.named_parameters():
        whole.get_parameter(name).data = meta_weight(weight).data
    whole.generation_config, whole._weight_conversions = held.generation_config, held._weight_conversions
    for name, file_bytes in (("one", 1 << 30), ("several", 10_000)):
        theirs, ours = tmp_path / name / "theirs", tmp_path / name / "ours"
        held.save_pretrained(theirs, max_shard_size=file_bytes)
        ours.mkdir()
        save_parts(held, whole, ours, Job(), file_bytes)
        expected, found = (
            {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}
            for folder in (theirs, ours)
        )
        assert found.keys() == expected.keys()
        assert all(found[key].dtype == each.dtype and torch.equal(found[key], each) for key, each in expected.items())
        assert (ours / "model.safetensors").exists() is (name == "one")
        for path in theirs.glob("*config.json"):
            assert (ours / path.name).read_bytes() == path.read_bytes()
        again = load_model(str(ours), config, torch.bfloat16).model
        assert all(torch.equal(each, held.state_dict()[key]) for key, each in again.state_dict().items())


@pytest.mark.soak
def test_a_process_needs_host_memory_for_its_share_and_little_more():
    """Loading and saving, on four processes, with fp32 master weights where they are sharded and where they are not.

    Of so large a model that the freed memory that the C library keeps, some 20 MiB whatever the model, is little.
    """
    program = [sys.executable, str(ROOT / "benchmarks" / "host_memory.py")]
    command = [*program, "--json", "--precision", "bf16", "--layers", "64"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert told.returncode == 0, told.stderr
    rows = json.loads(told.stdout)
    assert [(row["dp"], row["pp"]) for row in rows] == [(4, 1), (2, 2), (1, 4)]
    for row in rows:
        assert row["loaded / share"] <= 1.2 and row["saved / share"] <= 1.2, row
