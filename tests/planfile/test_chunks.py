"""The table of chunks: what the planner makes of it, what a file has of it, and rows say the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chunkplan import PlanConfig, build
from chunkplan.cost.model import CostModel
from chunkplan.planfile.chunks import Chunks, chunks_of_rank, chunks_of_rows, read_chunks, rows_of_chunks
from chunkplan.planfile.plan import KINDS, Chunk, Plan
from chunkplan.planning.batches import StepBlock
from chunkplan.planning.method import Dataset, chunk_block
from chunkplan.summary import chunk_frame
from tests.support.planned_steps import save

LENGTHS = [50, 20, 7, 7, 3, 2, 1, 65, 9, 30]
CONFIG = PlanConfig(chunk_size=8, k=2, dp=3, equal_chunks=True, cp="off", global_batch=5)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return build(save(tmp_path, LENGTHS), tmp_path / "plan", CONFIG)


def rows_by_rank(plan: Plan) -> list[tuple[Chunk, ...]]:
    return [tuple(chunks) for step in plan.iter_steps() for _, chunks in sorted(step.chunks.items())]


def assert_equal(one: Chunks, other: Chunks) -> None:
    for name, column, expected in zip(Chunks._fields, one, other, strict=True):
        assert column.dtype == expected.dtype and column.tolist() == expected.tolist(), name


def test_rows_and_table_say_the_same_of_every_rank(plan: Plan) -> None:
    table, ranks = read_chunks(plan.chunks()), rows_by_rank(plan)
    assert table.rank_chunks.tolist() == [0, *np.cumsum([len(rows) for rows in ranks])]
    for rank, rows in enumerate(ranks):
        assert rows_of_chunks(chunks_of_rank(table, rank)) == rows
        assert rows_of_chunks(chunks_of_rows(rows)) == rows


def test_a_plan_is_read_as_the_table_that_was_planned(plan: Plan) -> None:
    """Of one step, whose sequences are in the order of the shuffle."""
    first = next(plan.iter_steps())
    ids = {segment.sequence_id for rows in first.chunks.values() for row in rows for segment in row.segments}
    tokens = np.array(LENGTHS, np.int32)
    block = StepBlock(0, 0, np.array(sorted(ids), np.int32), np.array([len(ids)]))
    planned = chunk_block(block, Dataset(tokens, tokens - 1, None), CONFIG, CostModel()).chunks
    rows = plan.chunks()
    read = read_chunks(rows.slice(0, int(planned.rank_chunks[-1])))
    assert_equal(read, planned)


def test_a_chunk_is_of_the_same_kind_in_every_view(plan: Plan) -> None:
    rows = plan.chunks()
    kinds = [row.kind for rank in rows_by_rank(plan) for row in rank]
    assert chunk_frame(rows, read_chunks(rows))["kind"].to_list() == kinds
    assert set(kinds) == set(KINDS)
    for row in (row for rank in rows_by_rank(plan) for row in rank):
        assert (row.kind == "zero-loss") == (row.num_tokens == 0)
        assert (row.kind in ("dependent", "mixed")) == (row.group_id is not None)
        assert (row.kind == "mixed") == (row.group_id is not None and len(row.segments) > 1)
