"""A plan as a whole: what `validate` says of one that is unbroken, changed, moved, or full of strange numbers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunkplan import load_plan, validate
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.load import load_analysis
from chunkplan.validation.validate import PLAN_INVARIANTS
from tests.support.plan_rows import SCHEMAS, Rows, tamper


def test_an_unbroken_plan_passes_every_invariant_by_name(plan: Path, analysis: Path) -> None:
    result = validate(plan)
    assert result.ok
    assert result.passed == PLAN_INVARIANTS
    assert validate(analysis).ok


#: (table, path of names) of every column of whole numbers.
NUMBERS = [
    *((name, (field.name,)) for name, schema in SCHEMAS.items() for field in schema if pa.types.is_integer(field.type)),
    *(("chunks", ("segments", name)) for name in ("sequence_id", "start", "end")),
    *(("schedule", ("actions", name)) for name in ("chunk_id", "virtual_stage")),
]


@pytest.mark.parametrize("value", [-(2**31), -1, 2**31 - 1])
def test_no_number_in_a_table_makes_a_plan_valid_or_a_check_crash(plan: Path, value: int) -> None:
    saved = {name: (plan / name).read_bytes() for name in [f"{name}.parquet" for name in SCHEMAS] + ["manifest.json"]}
    for table, path in NUMBERS:

        def change(rows: Rows, table: str = table, path: tuple[str, ...] = path) -> None:
            row = rows[table][-1]
            place = row if len(path) == 1 else row[path[0]][-1]
            place[path[-1]] = value

        tamper(plan, change)
        assert validate(plan).violations, (table, path)
        for name, content in saved.items():
            (plan / name).write_bytes(content)


@pytest.mark.parametrize("name", ["epochs", "global_batch", "dp", "pp", "k"])
def test_no_number_in_the_config_makes_a_check_crash(plan: Path, name: str) -> None:
    """`k` alone may be as large as any number of chunks."""
    tamper(plan, lambda rows: None, **{name: {"dp": 1 << 16, "pp": 1 << 10}.get(name, 2**31 - 1)})
    assert bool(validate(plan).violations) == (name != "k")
    tamper(plan, lambda rows: None, **{name: 2**63 - 1})
    with pytest.raises(DataError, match=f"`config.{name}` is {2**63 - 1}, expected a whole number from 1 to"):
        validate(plan)


@pytest.mark.parametrize("name", ["steps", "chunks", "schedule"])
def test_a_changed_file_does_not_have_the_manifests_hash(plan: Path, name: str) -> None:
    table = pq.read_table(plan / f"{name}.parquet")
    column = {"steps": "predicted_us", "chunks": "cost", "schedule": "predicted_us"}[name]
    index = table.column_names.index(column)
    values = table.column(column).to_numpy() + np.float32(1)
    pq.write_table(table.set_column(index, table.schema.field(index), pa.array(values)), plan / f"{name}.parquet")
    violation = validate(plan).violations[0]
    assert violation.invariant == "content-hash"
    assert name in violation.message


def test_rewriting_a_file_with_another_layout_changes_nothing(plan: Path) -> None:
    """The hash is over content: other row groups, compression and writer metadata are the same plan."""
    for name in SCHEMAS:
        table = pq.read_table(plan / f"{name}.parquet")
        pq.write_table(table, plan / f"{name}.parquet", row_group_size=3, compression="none")
    assert validate(plan).ok
    assert [step.step for step in load_plan(plan).iter_steps(1)] == [1]


def test_another_analysis_is_not_the_plans(plan: Path, analysis: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.npy"
    np.save(other, np.array([*load_analysis(analysis).num_tokens[:-1], 12]))
    result = validate(plan, analysis=other)
    assert [violation.invariant for violation in result.violations] == ["content-hash"]
    assert not result.ok and not result.is_own_analysis
    alone = ("chunk-ids", "cp-groups", "cp-slices", "cp-order", "kept-attention", "equal-chunks", "chunk-size")
    assert result.passed == alone, "what the plan alone says is checked"
    assert {*result.passed, *result.unchecked, "content-hash"} == {*PLAN_INVARIANTS}
    tamper(plan, lambda rows: rows["chunks"][3].update(num_tokens=17))
    result = validate(plan, analysis=other)
    assert [violation.invariant for violation in result.violations] == ["content-hash", "chunk-size"]
    tamper(plan, lambda rows: rows["chunks"][0].update(chunk_id=5))
    result = validate(plan, analysis=other)
    assert [violation.invariant for violation in result.violations] == ["content-hash", "chunk-ids"]
    assert result.passed == ()


def test_an_analysis_that_moved_is_found_where_it_is_said_to_be(plan: Path, analysis: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.move(analysis, moved)
    with pytest.raises(UsageError, match=r"the analysis of the plan .* is not at"):
        validate(plan)
    assert validate(plan, analysis=moved).ok


def test_a_plan_moved_together_with_its_analysis_still_finds_it(plan: Path, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "analysis", tmp_path / "away" / "analysis")
    shutil.copytree(plan, tmp_path / "away" / "plan")
    shutil.rmtree(tmp_path / "analysis")
    assert validate(tmp_path / "away" / "plan").ok


def test_a_torn_file_is_refused(plan: Path) -> None:
    path = plan / "chunks.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"chunks\.parquet"):
        validate(plan)
