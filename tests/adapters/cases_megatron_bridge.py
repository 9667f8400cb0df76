"""Rows that Megatron-Bridge's data set reads out of a plan or an analysis: those of exported files, with no file.

With its own builder, collator and sampler.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from analyses import LENGTHS_IN_ROWS, sequences_in_rows, write_analysis
from megatron.bridge.data.builders.gpt_sft import build_gpt_sft_split
from megatron.bridge.data.packing.config import PackedSequenceSpecs
from megatron.bridge.data.packing.offline import _pre_pad_data_point
from megatron.bridge.data.packing.parquet import GPTSFTPackedParquetDataset
from megatron.bridge.data.samplers import MegatronPretrainingSampler
from places import section

import chunkplan
from chunkplan.adapters import megatron_bridge
from chunkplan.adapters.megatron_bridge import ChunkplanPackedDataset

EOS = 99


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """`analysis`, and a `plan` of it: whole sequences, two micro-batches of 64 tokens on each of two ranks a step."""
    folder = tmp_path / "chunkplan-out"
    write_analysis(folder / "analysis", sequences_in_rows())
    config = chunkplan.PlanConfig(chunk_size=64, k=1, dp=2, global_batch=8, epochs=2, micro_batches=2, cp="off")
    chunkplan.build(folder / "analysis", folder / "plan", config)
    return folder


def dataset(path: Path, **options: Any) -> Any:
    """What its builder makes of a path of packed data."""
    specs = PackedSequenceSpecs(packed_sequence_size=options.pop("size", 64), packed_train_data_path=str(path))
    return build_gpt_sft_split(
        specs.packed_train_data_path,
        tokenizer=SimpleNamespace(eos_id=EOS, eod=EOS, pad_id=EOS),
        seq_length=specs.packed_sequence_size,
        memmap_workers=1,
        seed=1,
        packed_sequence_size=specs.packed_sequence_size,
        **{"pad_seq_to_mult": 1, **options},
    )


def lists(items: Any) -> list[tuple[list[int], ...]]:
    names = ("input_ids", "loss_mask", "seq_boundaries")
    return [tuple(np.asarray(item[name]).tolist() for name in names) for item in items]


def documents(items: Any) -> list[tuple[list[int], list[int]]]:
    """The sequences of rows: their tokens and loss masks."""
    return sorted(
        (ids[start:stop], mask[start:stop]) for ids, mask, edges in lists(items) for start, stop in pairwise(edges)
    )


@pytest.mark.parametrize("source", ["plan", "analysis"])
def test_rows_and_batches_are_those_of_the_exported_files(workspace: Path, tmp_path: Path, source: str) -> None:
    chunkplan.export(
        workspace / source, tmp_path / "out", "megatron-bridge", chunk_size=64 if source == "analysis" else None
    )
    before = sorted(workspace.rglob("*"))
    files, lazy = dataset(tmp_path / "out"), dataset(workspace / source)
    assert type(files) is type(lazy) is ChunkplanPackedDataset is GPTSFTPackedParquetDataset
    assert len(files) == len(lazy) > 3
    assert sorted(lists(files)) == sorted(lists(lazy))
    order = [lists(files).index(row) for row in lists(lazy)]
    for mine, other in ((0, order[0]), (-1, order[-1] - len(files))):
        assert lists([lazy[mine]]) == lists([files[other]])
    ours = lazy.collate_fn([lazy[0], lazy[1]])
    theirs = files.collate_fn([files[order[0]], files[order[1]]])
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value, name
    assert sorted(workspace.rglob("*")) == before
    assert not sum(lazy[-1]["loss_mask"]) and sum(lazy[len(lazy) - 1]["loss_mask"])
    assert lists(pickle.loads(pickle.dumps(lazy))) == lists(lazy)


def test_a_number_of_samples_is_shuffled_as_of_files(workspace: Path, tmp_path: Path) -> None:
    chunkplan.export(workspace / "analysis", tmp_path / "out", "megatron-bridge", chunk_size=64)
    options = {"dataset_kwargs": {"max_num_samples": 11}}
    assert lists(dataset(tmp_path / "out", **options)) == lists(dataset(workspace / "analysis", **options))


def test_every_rank_gets_its_own_rows_of_a_plan(workspace: Path) -> None:
    lazy = dataset(workspace / "plan")
    plan, tokens = chunkplan.load_plan(workspace / "plan"), chunkplan.load_analysis(workspace / "analysis").tokens()
    for rank in range(2):
        chunks = (chunk for step in plan.iter_steps() for chunk in step.chunks[rank])
        expected = [np.concatenate([tokens(each.sequence_id)[0] for each in chunk.segments]) for chunk in chunks]
        got = [lazy[each]["input_ids"] for [each] in MegatronPretrainingSampler(len(lazy), 0, 1, rank, 2)]
        assert len(got) == len(expected) == 8
        assert all(map(np.array_equal, got, expected))


@pytest.mark.parametrize("multiple", [2, 4, 8])
def test_sequences_are_padded_as_its_own_preparation_pads_them(workspace: Path, multiple: int) -> None:
    lazy = dataset(workspace / "analysis", pad_seq_to_mult=multiple, size=64)
    assert documents(lazy) == sorted(padded(multiple))
    for index in range(len(lazy)):
        batch = lazy.collate_fn([lazy[index]])
        assert not (batch["cu_seqlens_q_padded"] % multiple)[0, :-1].any()
        assert batch["tokens"].shape[1] <= 64
        assert batch["loss_mask"].sum() == sum(lazy[index]["loss_mask"])


def padded(multiple: int) -> Iterator[tuple[list[int], list[int]]]:
    for ids, target in sequences_in_rows():
        data = {"input_ids": ids.tolist(), "loss_mask": [*map(int, target[1:]), 0]}
        stored = -(-(len(ids) - 1) // multiple) * multiple + 1
        _pre_pad_data_point(data, 64, stored, EOS)
        yield data["input_ids"], data["loss_mask"]


def test_batches_have_one_shape_where_boundaries_are_padded(workspace: Path) -> None:
    lazy = dataset(workspace / "plan", pad_cu_seqlens=True, dataset_kwargs={"pad_to_max_length": True})
    batches = [lazy.collate_fn([lazy[index]]) for index in range(len(lazy))]
    assert len({(batch["cu_seqlens_q"].shape, batch["tokens"].shape) for batch in batches}) == 1
    assert len({int(batch["max_seqlen_q"]) for batch in batches}) == 1
    with pytest.raises(AssertionError, match="pad_to_max_length"):
        dataset(workspace / "plan", pad_cu_seqlens=True)


def test_what_does_not_fit_says_what_does(workspace: Path) -> None:
    with pytest.raises(ValueError, match=r"a row of the plan has .*; 32 fit; use rows of"):
        dataset(workspace / "plan", size=32)
    with pytest.raises(ValueError, match=r"padded to a multiple of 32; 64 fit; use rows of"):
        dataset(workspace / "plan", pad_seq_to_mult=32)
    with pytest.raises(ValueError, match=r"2 of 16 sequences have more than 32 tokens.*whole_only=True leaves"):
        dataset(workspace / "analysis", size=32)
    assert len(documents(dataset(workspace / "analysis", size=63, pad_seq_to_mult=8))) == len(LENGTHS_IN_ROWS)


def test_parts_are_left_out_or_given_where_that_is_asked_for(workspace: Path) -> None:
    megatron_bridge.install(whole_only=True)
    assert len(documents(dataset(workspace / "analysis", size=32))) == 14
    megatron_bridge.install(allow_split=True)
    assert len(documents(dataset(workspace / "analysis", size=32))) == 18
    megatron_bridge.install()


def test_the_code_of_the_page_runs_as_written(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.parent)
    [block] = re.findall(r"```python\n(.*?)```", section("integrations.md", "Megatron-Bridge"), re.S)
    names: dict[str, Any] = {}
    exec(block, names)
    specs = names["specs"]
    assert len(dataset(specs.packed_train_data_path, size=specs.packed_sequence_size)) == 16
