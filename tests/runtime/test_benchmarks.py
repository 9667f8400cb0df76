"""The benchmarks of groups run: these programs call the runtime as it is, and nothing else does so in their ways."""

from __future__ import annotations

import numpy as np
import pytest

from chunkplan_runtime.layout import Block, RankLayout
from tests.support.places import ROOT


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def test_groups_of_a_layout_that_does_not_run_are_counted():
    import process_groups

    blocks = [Block(first, 4, 1) for first in (0, 4)] + [Block(0, 8, 2)]
    found = process_groups.count(RankLayout(dp=8, pp=4, process=9), blocks)
    # Of a stage in the middle: all, replicas, four of links; four ranks; of eight two share heads, and four pages.
    assert sorted(found.sizes) == [2, 2, 2, 2, 2, 4, 4, 8, 32]
    # Replicas, links, ends; two of four ranks, and of eight four of heads and two of pages, on every stage.
    assert found.num_calls == 4 + 3 * 8 * 2 + 8 + (2 + 4 + 2) * 4


@pytest.mark.soak
def test_processes_that_sleep_meet_as_the_plan_says(tmp_path, monkeypatch):
    import context_parallel

    monkeypatch.setattr(context_parallel, "LAYOUTS", ((2, 1),))
    monkeypatch.setattr(context_parallel, "SECONDS", 0.1)
    rows = context_parallel.measure_sleeping({"made up": np.array([99_000, 5, 900])}, 1, tmp_path)
    assert [(row["dp"], row["pp"], row["predicted"] > "1.5") for row in rows] == [(2, 1, True)]
    assert float(rows[0]["s with"].split()[0]) >= 0.1


@pytest.mark.soak
def test_stages_of_a_pipeline_that_sleep_are_replayed(monkeypatch):
    import pipeline

    monkeypatch.setattr(pipeline, "SECONDS", 0.2)
    makespans, bubbles = pipeline.measure_sleeping([[40_000, 900, 12]], 1)
    assert [row["way"] for row in makespans] == [row["way"] for row in bubbles]
    assert all(row["measured s"] >= row["replayed s"] for row in bubbles)


@pytest.mark.soak
def test_a_step_of_pairs_takes_a_few_numbers_a_target_token_more_than_sft_however_long_they_are():
    import losses

    rows = [*losses.measure_memory(64, 8)]
    assert [row["chunks of each answer"] for row in rows] == [1, 2, 4, 8]
    assert max(row["more, bytes a target token"] for row in rows) <= 16
    assert rows[-1]["sft without KV, MB"] <= 1.05 * rows[1]["sft without KV, MB"]
