"""Rows of a plan or an analysis in torchtitan's loader: documents as its own packing has them, ranks as planned."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from analyses import LENGTHS_IN_ROWS, sequences_in_rows, write_analysis
from places import section
from torchtitan.components.data import (
    FirstFitPackingConfig,
    GrainDataLoader,
    SampleProcessor,
    SingleDatasetConfig,
    TextSequence,
)

import chunkplan
from chunkplan.adapters.torchtitan import ChunkplanRowsConfig


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """`analysis`, and a `plan` of it: whole sequences, two micro-batches of 64 tokens on each of two ranks a step."""
    folder = tmp_path / "chunkplan-out"
    write_analysis(folder / "analysis", sequences_in_rows())
    config = chunkplan.PlanConfig(chunk_size=64, k=1, dp=2, global_batch=8, micro_batches=2, cp="off")
    chunkplan.build(folder / "analysis", folder / "plan", config)
    return folder


def loader(dataset: Any, rank: int = 0, ranks: int = 1, tokens: int = 64, **options: Any) -> GrainDataLoader:
    config = GrainDataLoader.Config(dataset=dataset, **{"shuffle": True, "repeat": ranks > 1, **options})
    return config.build(
        dp_world_size=ranks, dp_rank=rank, tokenizer=None, max_context_length=tokens, num_tokens_per_batch=tokens
    )


def documents(batches: Any) -> list[tuple[list[int], list[int]]]:
    """Inputs and labels of each, in order; padding is one more at the end of a batch, without labels."""
    found = []
    for inputs, labels in batches:
        edges = [*np.flatnonzero(inputs["positions"] == 0).tolist(), len(labels)]
        for start, stop in pairwise(edges):
            assert inputs["positions"][start:stop].tolist() == list(range(stop - start))
            if (labels[start:stop] >= 0).any():
                found.append((inputs["input"][start:stop].tolist(), labels[start:stop].tolist()))
    return found


class Shifted(SampleProcessor):
    """Inputs and labels of a sequence, as processors of torchtitan give them."""

    @dataclass(kw_only=True, slots=True)
    class Config(SampleProcessor.Config):
        pass

    def __init__(self, config: Config, *, context: object) -> None:
        pass

    def __call__(self, sample: tuple[Any, Any], rng: object) -> TextSequence:
        ids, target = sample
        return TextSequence(input_ids=ids[:-1], labels=np.where(target[1:], ids[1:], -100))


def test_a_packed_analysis_has_the_documents_of_its_own_packing(workspace: Path) -> None:
    source = SimpleNamespace(build=lambda dataset_iteration_policy: sequences_in_rows())
    documents_of = SingleDatasetConfig(source=source, processor=Shifted.Config())
    theirs = documents(loader(FirstFitPackingConfig(dataset=documents_of)))
    ours = documents(loader(ChunkplanRowsConfig(path=str(workspace / "analysis"))))
    assert len(theirs) == len(LENGTHS_IN_ROWS) and sorted(ours) == sorted(theirs)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_gets_its_own_rows_of_a_plan_in_order_and_goes_on_where_it_was(workspace: Path, rank: int) -> None:
    given = sequences_in_rows()
    expected = [
        [(given[each.sequence_id][0][:-1].tolist()) for each in chunk.segments]
        for step in chunkplan.load_plan(workspace / "plan").iter_steps()
        for chunk in step.chunks[rank]
    ]
    dataset = ChunkplanRowsConfig(path=str(workspace / "plan"))
    batches = iter(loader(dataset, rank, 2))
    got = [next(batches) for _ in expected]
    assert len(expected) == 4
    assert [[inputs for inputs, _ in documents([batch])] for batch in got] == expected
    first = loader(dataset, rank, 2)
    next(iter(first))
    again = loader(dataset, rank, 2)
    again.load_state_dict(first.state_dict())
    assert documents([next(iter(again))]) == documents([got[1]])


def test_what_does_not_fit_says_what_does(workspace: Path) -> None:
    plan = ChunkplanRowsConfig(path=str(workspace / "plan"))
    with pytest.raises(ValueError, match="plan for 2 data-parallel ranks, not 4; build it with --dp 4, or give"):
        loader(plan, 0, 4)
    with pytest.raises(ValueError, match=r"a row of the plan has .*; 32 fit; use rows of"):
        loader(plan, 0, 2, tokens=32)
    with pytest.raises(ValueError, match=r"2 of 16 sequences have more than 32 tokens.*allow_split=True makes"):
        loader(ChunkplanRowsConfig(path=str(workspace / "analysis")), tokens=32)
    with pytest.raises(ValueError, match="there is no"):
        loader(ChunkplanRowsConfig(path=str(workspace / "nothing")))


def test_the_code_of_the_page_runs_as_written(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.parent)
    [block] = re.findall(r"```python\n(.*?)```", section("integrations.md", "torchtitan"), re.S)
    names: dict[str, Any] = {}
    exec(block, names)
    assert documents([next(iter(loader(names["config"].dataset, 1, 2, tokens=8192)))])
