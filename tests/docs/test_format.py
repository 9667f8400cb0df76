"""Plans are read without chunkplan as the page about their files says: DuckDB, polars and pandas find what is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

import chunkplan
from chunkplan.planfile.analysis_writer import AnalysisWriter
from tests.support.places import ROOT

PAGE = (ROOT / "docs" / "plan-format.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Reading plans without chunkplan")[1].split("\n## ")[0]


@pytest.fixture
def expected(tmp_path, monkeypatch, random_sequences) -> list[list[tuple[Any, ...]]]:
    """The answers to the queries, in order: of two ranks of two stages, with split sequences and padding."""
    monkeypatch.chdir(tmp_path)
    Path("chunkplan-out/analysis").mkdir(parents=True)
    writer = AnalysisWriter(Path("chunkplan-out/analysis"))
    for record, (ids, target) in enumerate(random_sequences([25, 6, 14, 40, 5, 9, 17, 1, 8, 30, 2, 3])):
        writer.add(record % 3, record, ids.astype(np.int32), target)
    writer.finish(exact=True, sources=[])
    config = chunkplan.PlanConfig(chunk_size=16, k=1, global_batch=6, dp=2, pp=2, equal_chunks=True, cp="off")
    plan = chunkplan.build("chunkplan-out/analysis", "chunkplan-out/plan", config)
    steps = list(plan.iter_steps())
    chunks = [(rank, chunk) for rank, chunks in steps[1].chunks.items() for chunk in chunks]
    assert any(chunk.group_id is not None for _, chunk in chunks)
    assert any(not chunk.segments for _, chunk in chunks)
    segments = [
        (rank, chunk.chunk_id, part.sequence_id, part.start, part.end)
        for rank, chunk in chunks
        for part in chunk.segments
    ]
    return [
        [
            (step.step, rank, sum(chunk.num_tokens for chunk in chunks))
            for step in steps
            for rank, chunks in step.chunks.items()
        ],
        [
            (
                rank,
                chunk.chunk_id,
                chunk.group_id,
                chunk.prefix_tokens,
                chunk.keeps_activations,
                [{"sequence_id": part.sequence_id, "start": part.start, "end": part.end} for part in chunk.segments],
            )
            for rank, chunk in chunks
        ],
        segments,
        [(sequence_id, sequence_id % 3, sequence_id) for sequence_id in sorted({row[2] for row in segments})],
        [(action.op, action.chunk_id, action.virtual_stage) for action in steps[1].actions[0, 1]],
    ]


def test_duckdb_reads_what_the_plan_says(expected) -> None:
    [block] = re.findall(r"```sql\n(.*?)```", SECTION, re.S)
    queries = [query for query in block.split(";") if query.strip()]
    assert [duckdb.sql(query).fetchall() for query in queries] == expected


def test_polars_and_pandas_read_what_the_plan_says(expected) -> None:
    [block] = re.findall(r"```python\n(.*?)```", SECTION, re.S)
    found: dict[str, Any] = {}
    exec(block, found)
    names = ("tokens", "in_step", "segments", "origins", "actions")
    assert [found[name].rows() for name in names] == expected
    assert [(*place, tokens) for place, tokens in found["same"].items()] == expected[0]
