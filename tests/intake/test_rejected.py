"""What is left out and counted though errors stop the run: blank records, and answers that are labelled as bad ones."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chunkplan import IntakeOptions, analyze, validate
from chunkplan.errors import DataError
from chunkplan.intake.reading import IntakeRequest
from chunkplan.intake.schemas import SCHEMAS
from chunkplan.intake.shard import merge, write_shard
from tests.support.command_line import Run
from tests.support.intake_checks import ANSWERS, question_and_answer
from tests.support.places import ROOT
from tests.support.table_cases import write_records

TOKENIZER = ROOT / "sample_data" / "tokenizer"
_write = partial(write_records, rows=4)
DROP = IntakeOptions(undesirable="drop")


def _rejected(folder: Path) -> list[tuple[int | None, str]]:
    lines = (folder / "rejected.jsonl").read_text().splitlines()
    return [(one.get("line", one.get("record")), one["reason"]) for one in map(json.loads, lines)]


@pytest.mark.parametrize("schema", ANSWERS)
def test_bad_answers_stop_the_run_by_name_or_are_dropped_and_counted(tmp_path: Path, schema: str) -> None:
    records = [{**ANSWERS[schema], "label": number % 3 != 0} for number in range(9)]
    file = _write(tmp_path / "kto.jsonl", records)
    with pytest.raises(DataError, match="`label` is false") as caught:
        analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    assert caught.value.where == f"{file}:1"
    assert "--kto-negatives drop" in caught.value.hint
    analysis = analyze(file, tmp_path / "out", DROP, tokenizer=TOKENIZER)
    assert analysis.record.tolist() == [1, 2, 4, 5, 7, 8]
    assert analysis.manifest["rejected"] == {"undesirable": 3}
    assert analysis.options == DROP
    [source] = analysis.manifest["sources"]
    assert (source["schema"], source["reasons"], source["unread_keys"]) == (schema, {"undesirable": 3}, {})
    assert _rejected(tmp_path / "out") == [(1, "undesirable"), (4, "undesirable"), (7, "undesirable")]
    assert validate(tmp_path / "out").ok
    with pytest.raises(DataError, match="`label` is false"):  # what was dropped before is in the cache
        analyze(file, tmp_path / "out", tokenizer=TOKENIZER)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_labels_of_either_name_are_seen_wherever_they_begin(tmp_path: Path, name: str) -> None:
    said = ANSWERS["conversations"]
    records = [{**said, "kto_tag": None if n < 150 else n % 2 == 0, "label": None} for n in range(160)]
    file = _write(tmp_path / name, [*records, {**said, "kto_tag": None, "label": False}])
    with pytest.raises(DataError, match="`kto_tag` is false"):
        analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
    analysis = analyze(file, tmp_path / "out", DROP, tokenizer=TOKENIZER)
    assert analysis.manifest["rejected"] == {"undesirable": 6}
    assert analysis.manifest["sources"][0]["unread_keys"] == {}


def test_only_schemas_with_an_answer_have_labels() -> None:
    assert {name for name in SCHEMAS if "label" in SCHEMAS[name].roles} == ANSWERS.keys()


@pytest.mark.parametrize("name", ["a.json", "a.parquet", "a.arrow"])
def test_bad_answers_are_dropped_whatever_holds_them(tmp_path: Path, name: str) -> None:
    """Also where the label of most is null, or the labels of the first records are all good."""
    labels = [True, True, None, True, True, False, None, False]
    file = _write(tmp_path / name, [{"prompt": "a", "completion": f"b {label}", "label": label} for label in labels])
    with pytest.raises(DataError, match="`label` is false") as caught:
        analyze(file, tmp_path / "out")
    assert caught.value.where == f"{file}, record 5"
    analysis = analyze(file, tmp_path / "out", DROP)
    assert analysis.record.tolist() == [0, 1, 2, 3, 4, 6]
    assert analysis.manifest["rejected"] == {"undesirable": 2}


def test_a_label_that_is_no_boolean_is_not_read_unless_it_is_named(tmp_path: Path) -> None:
    file = _write(tmp_path / "x.jsonl", [{"question": "a", "answer": "b", "label": 0, "good": n > 1} for n in range(4)])
    analysis = analyze(file, tmp_path / "out")
    assert analysis.num_sequences == 4
    assert analysis.manifest["sources"][0]["unread_keys"] == {"good": 4, "label": 4}
    named = IntakeOptions(columns={"label": "good"}, undesirable="drop")
    assert analyze(file, tmp_path / "out", named).record.tolist() == [2, 3]
    _write(file, [{"question": "a", "answer": "b", "good": 1}])
    with pytest.raises(DataError, match="`good` is a number, expected true or false"):
        analyze(file, tmp_path / "out", named)


def test_shards_drop_what_one_run_drops(tmp_path: Path) -> None:
    files = [
        _write(tmp_path / f"{name}.jsonl", [{**ANSWERS[name], "label": n % 2 == 0} for n in range(4)])
        for name in ("messages", "instruction")
    ]
    for index in (1, 2):
        request = IntakeRequest(paths=files, options=DROP, cache=tmp_path / f"cache-{index}", tokenizer=TOKENIZER)
        write_shard(request, tmp_path / f"shard-{index}", (index, 2))
    merged = merge([tmp_path / "shard-1", tmp_path / "shard-2"], tmp_path / "merged")
    assert merged.manifest == analyze(files, tmp_path / "out", DROP, tokenizer=TOKENIZER).manifest
    assert merged.manifest["rejected"] == {"undesirable": 4}


def test_blank_records_are_counted_and_what_is_damaged_stops_the_run(tmp_path: Path) -> None:
    records = [{"text": "one"}, {"text": ""}, {"text": " \n"}, {"text": "two"}]
    file = _write(tmp_path / "data" / "a.jsonl", records)
    (tmp_path / "data" / "Init.txt").write_bytes(b"")
    chats = [{"messages": question_and_answer("a", "b")}, {"messages": []}, {"messages": question_and_answer(" ", "")}]
    _write(tmp_path / "data" / "c.parquet", chats)
    analysis = analyze(tmp_path / "data", tmp_path / "out", tokenizer=TOKENIZER)
    assert analysis.num_sequences == 3
    assert analysis.manifest["rejected"] == {"empty": 5}
    assert [source["reasons"] for source in analysis.manifest["sources"]] == [{"empty": 1}, {"empty": 2}, {"empty": 2}]
    assert _rejected(tmp_path / "out") == [(0, "empty"), (2, "empty"), (3, "empty"), (1, "empty"), (2, "empty")]
    assert validate(tmp_path / "out").ok
    _write(file, [*records, {"text": 5}])
    with pytest.raises(DataError, match="`text` is a number"):
        analyze(tmp_path / "data", tmp_path / "out", tokenizer=TOKENIZER)


@pytest.mark.parametrize(
    ("records", "options", "message", "hint"),
    [
        ([{"text": ""}] * 12, {}, "all 12 records are blank", "not blank"),
        ([{"text": ""}], {"on_error": "skip"}, "its record is blank", "not blank"),
        ([{**ANSWERS["messages"], "label": False}] * 3, {"undesirable": "drop"}, "3 undesirable: `label`", "`label`"),
        (
            [*([{"text": ""}] * 3), {"text": 1}, {"text": 2}],
            {"on_error": "skip"},
            "3 empty: `text` is blank; 2 schema: `text` is a number, expected a string",
            "can be read",
        ),
        (
            [{"text": "a b c d e f g h"}] * 2,
            {"max_length": 1, "long": "drop"},
            "2 too-long: 4 tokens, more than 1",
            "--max-length",
        ),
        ([{"text": "a"}] * 2, {"sample": 1e-9}, "none in the sample", "--sample"),
    ],
)
def test_where_nothing_is_left_the_true_reasons_are_given(
    tmp_path: Path, records: list[dict[str, Any]], options: dict[str, Any], message: str, hint: str
) -> None:
    file = _write(tmp_path / "x.jsonl", records)
    with pytest.raises(DataError) as caught:
        analyze(file, tmp_path / "out", IntakeOptions(**options))
    assert f"({message}" in caught.value.message
    assert hint in caught.value.hint


def test_a_source_that_is_mostly_blank_is_warned_of(command: Run) -> None:
    _write(Path("half.jsonl"), [{"text": "a b c"}, {"text": ""}])
    for number in range(7):
        _write(Path(f"most-{number}.jsonl"), [{"text": "a b c"}, {"text": ""}, {"text": " "}])
    assert "warning: mostly blank" not in command("analyze", "half.jsonl", "--tokenizer", TOKENIZER).err
    ran = command("analyze", "half.jsonl", "most-[0-6].jsonl", "--tokenizer", TOKENIZER)
    assert "15 rejected: empty" in ran.out
    assert "\nwarning: mostly blank: 2 of 3 records in most-0.jsonl, 2 of 3 records in most-1.jsonl" in ran.err
    assert "most-4.jsonl and 2 more\n" in ran.err
