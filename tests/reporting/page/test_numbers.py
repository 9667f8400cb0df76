"""What a page says of a plan: of all that it holds, and of no more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import chunkplan
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.plan import Plan
from chunkplan.quantities import gibibytes, percent, seconds
from tests.support.page_cases import Page, build_plan, tuning_of, write_and_read

Command = Callable[..., Any]


def total(made: Page, caption: str, column: int) -> int:
    """The sum of a column of whole numbers."""
    return sum(int(row[column].replace(",", "")) for row in made.tables[caption][1:])


def change_value(plan: Path, file: str, name: str, row: int, value: Any) -> None:
    """Put `value` into a column of a table of a plan."""
    path = plan / f"{file}.parquet"
    table = pq.read_table(path)
    place = table.schema.get_field_index(name)
    values = table.column(name).to_pylist()
    values[row] = value
    field = table.schema.field(place)
    pq.write_table(table.set_column(place, field, pa.array(values, field.type)), path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"holdout": 0.3}, ["held out", "to train on"]),
        ({"holdout": 0.3, "part": "eval"}, ["held out", "held out, to evaluate on"]),
        ({"epochs": 3}, ["epochs"]),
        ({"last_batch": "drop"}, ["of short last batches dropped"]),
    ],
)
def test_lengths_before_are_those_of_what_the_plan_holds(
    tmp_path: Path, changes: dict[str, Any], said: list[str]
) -> None:
    """The same tokens on both sides, and what the plan holds is named at the top."""
    plan = build_plan(tmp_path, **changes)
    totals = plan.manifest["totals"]
    made = write_and_read(tmp_path / "page.html", plan)
    assert totals["num_sequences"] != 60
    assert total(made, "Sequences by their number of tokens", 1) == totals["num_sequences"]
    assert total(made, "Sequences by their number of tokens", 3) == totals["num_tokens"]
    assert total(made, "Chunks by their number of tokens", 3) == totals["num_tokens"]
    head = made.text[: made.text.index("Lengths before")]
    assert [words for words in said if words not in head] == []
    assert "does not hold every sequence of its analysis once" in made.text


def test_of_a_mix_a_sequence_counts_as_often_as_it_is_held(tmp_path: Path) -> None:
    for name, num_records in (("a", 20), ("b", 30)):
        records = [json.dumps({"text": f"{name} {record} " * (record + 1)}) for record in range(num_records)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(records), encoding="utf-8")
    chunkplan.analyze([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "analysis", workers=1, use_cache=False)
    config = chunkplan.PlanConfig(chunk_size=64, k=2, global_batch=16, mix={"a.jsonl": 2.5, "b.jsonl": 0.5})
    plan = chunkplan.build(tmp_path / "analysis", tmp_path / "plan", config, workers=1)
    made = write_and_read(tmp_path / "page.html", plan)
    assert total(made, "Sequences by their number of tokens", 1) == 65
    assert total(made, "Sequences by their number of tokens", 3) == plan.manifest["totals"]["num_tokens"]
    assert "a.jsonl x 2.5" in made.text


def test_a_plan_of_everything_once_is_said_to_be_nothing_else(plan: Plan, tmp_path: Path) -> None:
    text = write_and_read(tmp_path / "page.html", plan).text
    head = text[: text.index("Lengths before")]
    assert [words for words in ("held out", "mix", "epochs", "dropped") if words in head] == []
    assert "does not hold every sequence" not in text


def test_tables_have_all_that_inspect_shows(plan: Plan, tmp_path: Path) -> None:
    report = chunkplan.plan_report(plan)
    made = write_and_read(tmp_path / "page.html", plan)
    tables, text = made.tables, made.text
    shares = [[row.fill, row.token_share, row.attention_share, row.cost_share] for row in report.kinds]
    assert tables["Chunks by kind"][1:] == [
        [row.kind, f"{row.num_chunks:,}", f"{row.num_tokens:,}", *map(percent, of_kind)]
        for row, of_kind in zip(report.kinds, shares, strict=True)
    ]
    assert [row[1] for row in tables["Chunks by fill"][1:]] == [f"{band.num_chunks:,}" for band in report.fill]
    assert len(report.fill) == 10
    slowest = [[str(step.step), seconds(step.predicted_us), step.why] for step in report.times.slowest]
    assert [[row[0], row[1], row[3]] for row in tables["Slowest steps"][1:-1]] == slowest
    assert tables["Slowest steps"][-1][0] == str(report.times.median_step)
    assert [row[3] for row in tables["Ranks, over all steps"][1:]] == [seconds(rank.cost_us) for rank in report.ranks]
    assert report.memory is not None
    memory = report.memory
    said = f"Fullest GPU: {gibibytes(memory.memory.total)} of {gibibytes(memory.gpu_bytes)}, on stage "
    assert said in text and f"weights {gibibytes(memory.memory.weights).removesuffix(' GiB')}" in text


def test_a_page_never_takes_the_place_of_what_it_is_made_of(tmp_path: Path) -> None:
    """Nor of a file in the folder of a plan or an analysis, under whatever name, asked for from Python."""
    plan = build_plan(tmp_path)
    (tmp_path / "tune.json").write_text(json.dumps(tuning_of(tmp_path)), encoding="utf-8")
    (tmp_path / "link").symlink_to(plan.path)
    (tmp_path / "moved.npy").symlink_to("lengths.npy")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    options = {"tuning": tmp_path / "tune.json", "analysis": tmp_path / "moved.npy"}
    for output in ("plan/page.html", "link/chunks.parquet", "plan/../lengths.npy", "tune.json", "moved.npy"):
        with pytest.raises(UsageError, match="would damage"):
            chunkplan.write_report(tmp_path / output, plan, **options)
    with pytest.raises(UsageError, match="would damage"):
        chunkplan.write_report(tmp_path / "lengths.npy", plan)
    with pytest.raises(UsageError, match="would damage"):
        chunkplan.write_report(tmp_path / "lengths.npy", tmp_path / "lengths.npy")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    chunkplan.write_report(tmp_path / "page.html", plan, **options)


def test_a_tuning_of_other_data_or_another_model_is_said_on_the_page_and_on_stderr(
    plan: Plan, tuning: dict[str, Any], tmp_path: Path, command: Command
) -> None:
    cost_model = plan.manifest["predictions"]["cost_model"]
    same = json.loads(json.dumps({**tuning, "cost_model": cost_model}))
    same["cost_model"]["hardware"]["memory_bytes"] += 1
    other = json.loads(json.dumps(same))
    other["data"] |= {"longest_sequence": 500, "token_histogram": {"512": 1.0}}
    other["cost_model"]["shape"]["name"] = "another"
    other["cost_model"]["hardware"]["host_bytes"] += 1
    other["cost_model"]["precision"] = "fp32"
    other["chosen"]["tp"] *= 2
    other["options"]["global_batch"] = 8
    (tmp_path / "same.json").write_text(json.dumps(same), encoding="utf-8")
    (tmp_path / "other.json").write_text(json.dumps(other), encoding="utf-8")
    assert chunkplan.write_report(tmp_path / "page.html", plan, tuning=tmp_path / "same.json") == ()
    warnings = chunkplan.write_report(tmp_path / "page.html", plan, tuning=tmp_path / "other.json")
    assert [words.split(":")[0] for words in warnings] == [
        "The tuning is of other data",
        "The tuning is for another model",
        f"The tuning has other numbers for the GPU {cost_model['hardware']['name']} than the plan.",
        "The tuning is for fp32, the plan's times are for bf16.",
        "The tuning is for 8 GPUs, the plan is for 4 GPUs.",
        "The tuning is for steps of 8 sequences, those of the plan have 16.",
    ]
    made = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert [words for words in warnings if words not in made.text] == []
    ran = command("inspect", plan.path, "--html", "page.html", "--tuning", "other.json")
    assert ran.code == 0
    assert ran.err.splitlines()[: len(warnings)] == [f"warning: {words}" for words in warnings]
    of_data = chunkplan.write_report(tmp_path / "page.html", plan.analysis_path, tuning=tmp_path / "other.json")
    assert of_data == warnings[:1]


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("chunks", "dp_rank", 99),
        ("chunks", "step", -1),
        ("chunks", "num_tokens", -1),
        ("chunks", "num_tokens", 10**6),
        ("schedule", "dp_rank", 99),
        ("steps", "step", 99),
    ],
)
def test_tables_of_no_such_plan_are_refused(plan: Plan, tmp_path: Path, file: str, name: str, value: int) -> None:
    shutil.copytree(plan.path, tmp_path / "plan")
    change_value(tmp_path / "plan", file, name, -1, value)
    with pytest.raises(DataError):
        chunkplan.write_report(tmp_path / "page.html", tmp_path / "plan")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("segment", "words"),
    [
        ({"sequence_id": 60, "start": 0, "end": 9}, "the analysis has no sequence 60"),
        ({"sequence_id": 5, "start": 1, "end": 9}, "sequences begin in its chunks, expected 120"),
    ],
)
def test_sequences_that_are_not_there_are_refused(tmp_path: Path, segment: dict[str, int], words: str) -> None:
    plan = build_plan(tmp_path, epochs=2)
    change_value(plan.path, "chunks", "segments", 0, [segment])
    with pytest.raises(DataError, match=words):
        chunkplan.write_report(tmp_path / "page.html", plan)
