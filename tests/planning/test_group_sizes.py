"""Ranks share sequences within ChunkSize, without an empty slice, and no faster than the bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chunkplan
from chunkplan.planfile.plan import Plan
from tests.support.places import ROOT
from tests.support.planned_steps import save


def shared_plan(folder: Path, lengths: list[int], **config: Any) -> Plan:
    """The plan of sequences of `lengths`, which ranks may share."""
    values = {"k": 2, "cp": "auto", **config}
    return chunkplan.build(save(folder, lengths), folder / "plan", chunkplan.PlanConfig(**values))


@pytest.mark.parametrize("chunk_size", [3, 5, 7, 8])
def test_a_rank_has_no_more_than_chunk_size_of_a_shared_chunk(tmp_path: Path, chunk_size: int) -> None:
    """Also of an odd one: two slices of a chunk differ by a token each."""
    rng = np.random.default_rng(chunk_size)
    num_shared = 0
    for dp in (4, 7, 8):
        lengths = rng.integers(1, 3 * chunk_size * dp, 12).tolist()
        for step in shared_plan(tmp_path, lengths, chunk_size=chunk_size, dp=dp, global_batch=3).iter_steps():
            for chunk in (chunk for chunks in step.chunks.values() for chunk in chunks):
                assert chunk.num_tokens <= chunk_size
                num_shared += chunk.cp_size > 1
    assert num_shared > 20


@pytest.mark.parametrize("cp", [2, 8])
def test_a_sequence_with_too_few_tokens_for_all_slices_is_not_shared(tmp_path: Path, cp: int) -> None:
    lengths = [1, 2, 3, 5, 15, 16, 17, 40]
    for step in shared_plan(tmp_path, lengths, chunk_size=2, dp=8, cp=cp, global_batch=1).iter_steps():
        chunks = [chunk for chunks in step.chunks.values() for chunk in chunks]
        assert {chunk.cp_size for chunk in chunks} <= {1, 2, 4, 8}
        assert all(part.end > part.start for chunk in chunks for part in chunk.segments)
        assert sum(part.end - part.start for chunk in chunks for part in chunk.segments) in lengths


def test_rules_of_others_take_as_long_as_a_plan_of_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence that all ranks share, in one chunk: as the benchmark times it, and as the planner does."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from group_rules import skrull, static_groups  # type: ignore[import-not-found]

    cost, tokens = chunkplan.CostModel(), np.array([40_000])
    plan = shared_plan(tmp_path, [40_000], chunk_size=8192, dp=8)
    [step] = plan.iter_steps()
    assert {chunk.cp_size for chunks in step.chunks.values() for chunk in chunks} == {8}
    planned = 1e3 * plan.manifest["predictions"]["predicted_us"]
    for rule in (static_groups(cost, 8, 8, 8192), skrull(cost, 8, 8, 8192)):
        assert rule(tokens).ns == pytest.approx(planned, rel=1e-6)
        assert rule(tokens).tokens == 5000
    assert static_groups(cost, 8, 4, 8192)(tokens).ns > 1.5 * planned
    assert skrull(cost, 8, 8, 40_000)(tokens).tokens == 40_000  # it fits one rank, which it is left to
