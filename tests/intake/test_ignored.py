"""Keys that the user ignores are as if they were not there, in every reader, and are listed as not read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chunkplan import IntakeOptions, analyze
from chunkplan.errors import UsageError
from chunkplan.intake.reading import IntakeRequest
from chunkplan.intake.shard import merge, write_shard
from chunkplan.intake.source_columns import ignored_of_sources
from chunkplan.planfile.analysis import Analysis
from tests.support.command_line import Run
from tests.support.intake_checks import question_and_answer, write_lines
from tests.support.places import ROOT
from tests.support.table_cases import write_records

TOKENIZER = ROOT / "sample_data" / "tokenizer"

_ROWS = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}] * 3


def _targets(analysis: Analysis) -> list[int]:
    return [int(number) for number in analysis.num_target_tokens]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
def test_a_role_that_is_ignored_is_as_if_it_was_not_there_in_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    path = write_records(tmp_path / f"a.{kind}", _ROWS)
    assert _targets(analyze(path, tmp_path / "read")) == [2, 2, 2]
    found = analyze(path, tmp_path / "ignored", IntakeOptions(ignore_columns=("labels",)))
    assert _targets(found) == [3, 3, 3]
    assert list(found.manifest["sources"][0]["unread_keys"]) == ["labels"]
    assert found.options is not None
    assert found.options.ignore_columns == ("labels",)
    assert _targets(analyze(path, tmp_path / "read")) == [2, 2, 2]  # in one cache with the other


@pytest.mark.parametrize("is_text", [False, True])
def test_a_key_within_messages_is_ignored_by_the_name_that_screens_have(tmp_path: Path, is_text: bool) -> None:
    question, answer = question_and_answer("Hi!", "Hello.")
    messages = [question, {**answer, "weight": 0}, question, {**answer, "weight": 1}]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": json.dumps(messages) if is_text else messages}])
    counts = []
    for name, ignored in (("read", ()), ("ignored", ("messages[].weight",))):
        found = analyze(path, tmp_path / name, IntakeOptions(ignore_columns=ignored), tokenizer=TOKENIZER)
        counts.append((_targets(found), found.manifest["sources"][0]["unread_keys"]))
    (read, unread), (both, listed) = counts
    assert both == [2 * read[0]]
    assert (unread, listed) == ({}, {"messages[].weight": 1})


def test_keys_are_ignored_for_all_sources_or_for_those_of_a_name() -> None:
    paths = ["d/a.jsonl", "s3://b/c.parquet"]
    for typed, found in {
        "weight": [("weight",), ("weight",)],
        "a.jsonl:weight": [("weight",), ()],
        "*.jsonl:messages[].weight": [("messages[].weight",), ()],
        "s3://b/c.parquet:xml:lang": [(), ("xml:lang",)],
        "xml:lang": [("xml:lang",), ("xml:lang",)],
    }.items():
        assert ignored_of_sources([typed], paths) == found


def test_of_several_sources_one_is_named_on_the_command_line_and_in_files(tmp_path: Path, command: Run) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_lines(tmp_path / name, _ROWS)
    (tmp_path / "c.toml").write_text('ignore-columns = ["b.jsonl:labels"]\n')
    typed = ["analyze", "a.jsonl", "b.jsonl", "--json"]
    for more, targets in (
        (["--ignore-column", "a.jsonl:labels"], 3 * 3 + 3 * 2),
        (["--config", "c.toml"], 3 * 3 + 3 * 2),
        (["--config", "c.toml", "--ignore-column", "a.jsonl:labels"], 6 * 3),
    ):
        assert json.loads(command(*typed, *more).out)["report"]["num_target_tokens"] == targets
    shown = command("inspect", "--record", "a.jsonl:1", "--ignore-column", "labels").out
    assert shown.count("`labels`") == shown.count("not read") == 1
    with pytest.raises(UsageError, match="ignore-column"):
        IntakeOptions(ignore_columns=("",))


def test_shards_are_of_one_run_only_if_they_ignore_the_same(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", _ROWS)
    for number, keys in ((1, ("labels",)), (2, ("labels",)), (3, ())):
        request = IntakeRequest(paths=path, cache=tmp_path / "cache", options=IntakeOptions(ignore_columns=keys))
        write_shard(request, tmp_path / str(number), (min(number, 2), 2))
    assert _targets(merge([tmp_path / "1", tmp_path / "2"], tmp_path / "out")) == [3, 3, 3]
    with pytest.raises(UsageError, match="different options"):
        merge([tmp_path / "1", tmp_path / "3"], tmp_path / "out")
