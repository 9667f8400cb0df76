"""Keys of roles for the sources of a name: matched, preferred, refused, read back, and part of what is cached."""

from __future__ import annotations

from pathlib import Path

import pytest

from chunkplan import IntakeOptions, analyze, load_analysis
from chunkplan.errors import UsageError
from chunkplan.intake.reading import IntakeRequest
from chunkplan.intake.shard import merge, write_shard
from chunkplan.intake.source_columns import columns_of_sources, name_of_source
from tests.support.intake_checks import write_lines
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"

PATHS = ["d/code/humaneval.jsonl", "d/qa.jsonl", "s3://bucket/x/[1].parquet"]


@pytest.mark.parametrize(
    ("source", "matched"),
    [
        ("humaneval.jsonl", [0]),
        ("code/humaneval.jsonl", [0]),
        ("d/code/humaneval.jsonl", [0]),
        ("./d/qa.jsonl", [1]),
        ("./*/*.jsonl", [1]),
        ("*.jsonl", [0, 1]),
        ("d/*.jsonl", [1]),
        ("code/*", [0]),
        ("[1].parquet", [2]),
        ("s3://bucket/x/*.parquet", [2]),
        ("*", [0, 1, 2]),
    ],
)
def test_a_source_is_named_by_the_end_of_its_path_or_a_pattern_of_it(source: str, matched: list[int]) -> None:
    found = columns_of_sources({"text": "body", f"{source}:text": "code"}, PATHS)
    assert [index for index, columns in enumerate(found) if columns == {"text": "code"}] == matched
    assert all(columns == {"text": "body"} for index, columns in enumerate(found) if index not in matched)


@pytest.mark.parametrize(
    "source", ["eval.jsonl", "code", "d", "Humaneval.jsonl", "*.json", "x/code/humaneval.jsonl", "./qa.jsonl"]
)
def test_a_mapping_for_no_source_is_refused_with_those_there_are(source: str) -> None:
    with pytest.raises(UsageError, match="no source is") as caught:
        columns_of_sources({f"{source}:text": "code"}, PATHS)
    assert all(path in caught.value.message for path in PATHS)
    with pytest.raises(UsageError, match=r"h\.jsonl and 92 more"):
        columns_of_sources({f"{source}:text": "code"}, [f"{letter}.jsonl" for letter in "abcdefgh"] + ["x.npy"] * 92)


def test_two_mappings_that_contradict_for_one_source_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\*\.jsonl:text=a and --column qa\.jsonl:text=b are both for d/qa\.jsonl"):
        columns_of_sources({"*.jsonl:text": "a", "qa.jsonl:text": "b"}, PATHS)
    found = columns_of_sources({"*.jsonl:text": "a", "qa.jsonl:text": "a", "qa.jsonl:tools": "b"}, PATHS)
    assert found == [{"text": "a"}, {"text": "a", "tools": "b"}, {}]


@pytest.mark.parametrize(
    ("path", "paths", "name"),
    [
        ("d/a.jsonl", ["d/a.jsonl", "d/b.jsonl"], "a.jsonl"),
        ("d/a.jsonl", ["d/a.jsonl", "e/a.jsonl"], "d/a.jsonl"),
        ("x/d/a.jsonl", ["x/d/a.jsonl", "y/d/a.jsonl", "a.jsonl"], "x/d/a.jsonl"),
        ("a.jsonl", ["x/d/a.jsonl", "a.jsonl"], "./a.jsonl"),
        ("a=b.jsonl", ["x/d/a=b.jsonl", "a=b.jsonl"], "./a[<->]b.jsonl"),
        ("./a.jsonl", ["./a.jsonl", "x/a.jsonl"], "./a.jsonl"),
        ("/t/a.jsonl", ["/t/a.jsonl", "/t/t/a.jsonl"], "/t/a.jsonl"),
        ("a=b", ["a=b", "a<b"], None),
        ("d/[1].jsonl", ["d/[1].jsonl", "d/2.jsonl"], "[1].jsonl"),
        ("d/[1].jsonl", ["d/[1].jsonl", "d/1.jsonl"], "[[]1].jsonl"),
        ("d/*.jsonl", ["d/*.jsonl", "d/1.jsonl"], "[*].jsonl"),
        ("d/a=b.jsonl", ["d/a=b.jsonl", "d/a-b.jsonl"], "a[<->]b.jsonl"),
        ("d/a\n.jsonl", ["d/a\n.jsonl", "d/b.jsonl"], "a?.jsonl"),
        ("s3://b/x/1.jsonl", ["s3://b/x/1.jsonl", "s3://b/y/1.jsonl"], "x/1.jsonl"),
        ("-", ["-", "d/b.jsonl"], "-"),
        ("a.jsonl", ["a.jsonl", "a.jsonl", "b.jsonl"], "a.jsonl"),
    ],
)
def test_the_name_of_a_source_is_the_shortest_that_is_of_no_other(
    path: str, paths: list[str], name: str | None
) -> None:
    assert name_of_source(path, paths) == name
    if name is not None:
        found = columns_of_sources(IntakeOptions(columns={f"{name}:text": "body"}).columns, paths)
        assert [columns == {"text": "body"} for columns in found] == [other == path for other in paths]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    one = {"prompt": "def f", "canonical_solution": "  return 1", "completion": "wrong"}
    write_lines(tmp_path / "data" / "humaneval.jsonl", [one] * 3)
    write_lines(tmp_path / "data" / "qa.jsonl", [{"prompt": "is it?", "answer": "yes it is"}] * 3)
    return tmp_path / "data"


OPTIONS = IntakeOptions(columns={"completion": "answer", "humaneval.jsonl:completion": "canonical_solution"})


def test_sources_are_read_by_their_own_keys_and_the_options_are_read_back(data: Path, tmp_path: Path) -> None:
    analysis = analyze(data, tmp_path / "out", OPTIONS, tokenizer=TOKENIZER)
    keys = [source["columns"]["completion"] for source in analysis.manifest["sources"]]
    assert keys == ["canonical_solution", "answer"]
    assert load_analysis(tmp_path / "out").options == OPTIONS
    for index in (1, 2):
        request = IntakeRequest(paths=data, tokenizer=TOKENIZER, options=OPTIONS, cache=tmp_path / f"cache-{index}")
        write_shard(request, tmp_path / f"shard-{index}", (index, 2))
    assert merge([tmp_path / "shard-1", tmp_path / "shard-2"], tmp_path / "merged").manifest == analysis.manifest


def test_another_mapping_is_no_hit_of_the_cache(data: Path, tmp_path: Path) -> None:
    ignoring = IntakeOptions(ignore_columns=("canonical_solution",))
    first = analyze(data / "humaneval.jsonl", tmp_path / "out", ignoring, tokenizer=TOKENIZER)
    options = IntakeOptions(columns={"humaneval.jsonl:completion": "canonical_solution"})
    other = analyze(data / "humaneval.jsonl", tmp_path / "out", options, tokenizer=TOKENIZER)
    assert other.content_hash != first.content_hash
    again = analyze(data / "humaneval.jsonl", tmp_path / "out", ignoring, tokenizer=TOKENIZER)
    assert again.content_hash == first.content_hash
