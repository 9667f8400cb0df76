"""Steps, ranks and stages by number: where a plan's tables are damaged, one is refused with its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import chunkplan
from chunkplan.planfile.schema import CHUNKS, SLOTS
from tests.support.command_line import Run

SCHEMAS = {"chunks": CHUNKS, "schedule": SLOTS}
Rows = list[dict[str, Any]]


def put(row: int, name: str, value: Any) -> Callable[[Rows], None]:
    """Another value in a row."""
    return lambda rows: rows[row].update({name: value})


#: By the place that is named and what is said of it: the table, and what is done to its rows. Step 1 has 3 chunks on
#: each of 2 ranks with 2 stages.
DAMAGES: dict[tuple[str, str], tuple[str, Callable[[Rows], None]]] = {
    ("step 1, rank 99", "the plan has no such rank"): ("chunks", put(-1, "dp_rank", 99)),
    ("step 1, rank -1", "the plan has no such rank"): ("chunks", put(-1, "dp_rank", -1)),
    ("step 1, rank 1", "no chunks"): ("chunks", lambda rows: [row.update(dp_rank=0) for row in rows[-3:]] and None),
    ("step 1, rank 1", "the chunks are not numbered"): ("chunks", put(-1, "chunk_id", 7)),
    ("step 1, rank 0, stage -1", "the plan has no such stage"): ("schedule", put(-4, "stage", -1)),
    ("step 1, rank 1, stage 1", "no actions"): ("schedule", lambda rows: rows.pop() and None),
}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    np.save(tmp_path / "lengths.npy", np.full(12, 128))
    config = chunkplan.PlanConfig(chunk_size=128, k=1, dp=2, pp=2, cp="off", global_batch=6)
    return chunkplan.build(tmp_path / "lengths.npy", tmp_path / "plan", config).path


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_refused_by_its_place(damage: tuple[str, str], plan: Path, command: Run) -> None:
    place, said = damage
    table, change = DAMAGES[damage]
    file = plan / f"{table}.parquet"
    rows = pq.read_table(file).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, SCHEMAS[table]), file)
    shown = [
        ("--step", 1),
        ("--step", 1, "--json"),
        ("--step", 1, "--rank", 0),
        ("--step", 1, "--rank", 0, "--chunk", 0),
    ]
    for words in shown:
        ran = command("inspect", "plan", *words)
        assert (ran.code, ran.out) == (3, "")
        assert ran.err.startswith(f"error: plan/{table}.parquet, {place}") and said in ran.err
        assert "hint: `chunkplan validate` says what is wrong with the plan" in ran.err
    assert command("simulate", "plan", "--step", 1).code == 3
    assert command("inspect", "plan", "--step", 0).code == 0, "the other step is whole"
    assert command("validate", "plan").code == 4, "as the hint promises"
