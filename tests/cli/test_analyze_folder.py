"""`chunkplan analyze FOLDER`, where a folder is not a dataset: stray files, damaged ones, and sources of other keys."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support.analyze_cases import TOKENIZER, write
from tests.support.command_line import Run


@pytest.fixture
def run(command: Run) -> Run:
    """Run `chunkplan ARGUMENTS` beside `a folder` with two datasets of different keys."""
    Path("a folder/code").mkdir(parents=True)
    write("a folder/code/humaneval.jsonl", *[{"prompt": "def f", "canonical_solution": "  return 1"}] * 3)
    write("a folder/qa.jsonl", *[{"prompt": "is it?", "completion": "yes it is"}] * 3)
    return command


MAPPING = ("--column", "humaneval.jsonl:completion=canonical_solution")


def test_the_command_of_the_hint_leaves_out_what_cannot_be_read_and_names_it(run: Run) -> None:
    write("a folder/stats.json", {"records": 7})
    Path("a folder/empty.jsonl").touch()
    for words in ((), ("--shard", "1/2")):
        ran = run("analyze", "a folder", "--tokenizer", TOKENIZER, *MAPPING, *words)
        assert (ran.code, ran.out) == (3, "")
        first, *lines, hint = ran.err.splitlines()
        assert first == "error: 2 of 4 sources cannot be read, and nothing was tokenised"
        assert [line.partition(": ")[0] for line in lines] == ["  a folder/empty.jsonl", "  a folder/stats.json"]
        assert not Path("chunkplan-out", "shard-1-of-2" if words else "analysis").exists()
        [pasted] = re.findall(r"hint: `(.*)` leaves these sources out and lists them", hint)
        again = run(*shlex.split(pasted)[1:])
        assert again.code == 0, again.err
    again = run("analyze", "a folder", "--tokenizer", TOKENIZER, *MAPPING, "--on-error", "skip")
    assert "warning: 2 sources cannot be read and are left out:\n     a folder/empty.jsonl: the file is" in again.err
    assert "\n     a folder/stats.json: no schema fits the keys" in again.err
    assert "read a folder/stats.json" not in again.err
    assert "8 records = 6 sequences + 2 rejected" in again.err
    listed = [json.loads(line) for line in Path("chunkplan-out/analysis/rejected.jsonl").read_text().splitlines()]
    assert [one["file"] for one in listed] == ["a folder/empty.jsonl", "a folder/stats.json"]
    assert run("validate", "chunkplan-out/analysis").code == 0


def test_a_name_cannot_pretend_to_be_another_line_of_the_error(run: Run) -> None:
    for name in ("x\nerror: no.jsonl", "y.jsonl"):
        Path("a folder", name).touch()
    ran = run("analyze", "a folder", *MAPPING)
    assert ran.code == 3
    assert len(ran.err.splitlines()) == 4


def test_files_beside_the_data_are_counted_in_a_note(run: Run) -> None:
    names = ("README.md", "a.png", "code/b.png", "LICENSE", "LICENSE.txt", "readme.txt", ".gitattributes")
    for name in (*names, "dataset_infos.json"):
        Path("a folder", name).write_text("no data")
    Path("a folder/.git").mkdir()
    Path("a folder/.git/config").touch()
    note = "not read, no data: 8 files"
    for words in ((), ("--json",)):
        ran = run("analyze", "a folder", "--tokenizer", TOKENIZER, *MAPPING, *words)
        assert ran.code == 0, ran.err
        said = " ".join(ran.err.partition(note)[2].split())
        assert said.startswith(
            "(2 .png, 1 .gitattributes, 1 .md, 1 LICENSE, 1 LICENSE.txt, 1 dataset_infos.json, 1 readme.txt) analysis"
        )
    assert len(json.loads(ran.out)["sources"]) == 2
    assert note in run("analyze", "a folder/**", "--tokenizer", TOKENIZER, *MAPPING).err.replace("7 files", "8 files")
    assert note in run("analyze", "a folder", "--tokenizer", TOKENIZER, *MAPPING, "--shard", "1/1").err
    assert "no data" not in run("analyze", "a folder/qa.jsonl", "--tokenizer", TOKENIZER).err


def test_a_mapping_may_be_for_one_source(run: Run) -> None:
    ran = run("analyze", "a folder", "--tokenizer", TOKENIZER, *MAPPING, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert [source["columns"]["completion"] for source in found["sources"]] == ["canonical_solution", "completion"]
    assert found["options"]["columns"] == {"humaneval.jsonl:completion": "canonical_solution"}
    run("analyze", "a folder/qa.jsonl", "--tokenizer", TOKENIZER, "--output", "other")
    assert "humaneval.jsonl:completion" in run("diff", "other", "chunkplan-out/analysis").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("human.jsonl:completion=x",),
            "no source is human.jsonl; there are a folder/code/humaneval.jsonl, a folder/qa",
        ),
        (("*.jsonl:completion=x", "qa.jsonl:completion=y"), "are both for a folder/qa.jsonl"),
        (("qa.jsonl:completion=x", "qa.jsonl:completion=y"), "two columns for the role completion of qa.jsonl"),
        ((":completion=x",), "--column is ':completion=x', expected ROLE=KEY or SOURCE:ROLE=KEY"),
        (("qa.jsonl:words=x",), "--column words=...: no schema has such a role"),
    ],
)
def test_a_mapping_that_makes_no_sense_is_refused(run: Run, words: tuple[str, ...], message: str) -> None:
    ran = run("analyze", "a folder", *(part for word in words for part in ("--column", word)))
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert "\nhint: " in ran.err
