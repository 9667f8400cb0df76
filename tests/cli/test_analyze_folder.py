"""`chunkplan analyze FOLDER`, where a folder is not a dataset: stray files, damaged ones, and sources of other keys."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.analyze_cases import TOKENIZER, write
from tests.support.command_line import Run
from tests.support.intake_checks import question_and_answer


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
        [pasted] = re.findall(r"hint: `(.*)` leaves these sources out \(15 bytes\) and lists them", hint)
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


#: Files no schema fits, with what is read once the line is pasted: the schema, and the keys of its roles.
ODD: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "d1/train.jsonl": ([{"question": "is it?", "response": "it is"}], "question+answer", "question response"),
    "d2/train.jsonl": ([{"User": "is it?", "Bot": "it is"}], "question+answer", "User Bot"),
    "d2/in/depth/train.jsonl": (
        [{"Instruction": "Add.", "Input": "1 2", "Output": "3"}, {"Instruction": "Hi!", "Input": "", "Output": "Hi."}],
        *("instruction", "Instruction Output Input"),
    ),
    "my file.jsonl": ([{"Question Text": "is it?", "Best": None, "Best Answer": "it is"}], "question+answer", ""),
    "a:b.jsonl": ([{"q_text": "is it so?", "a_answer": "it is so"}], "question+answer", "q_text a_answer"),
    "a=b.jsonl": ([{"Body": "some words"}], "text", "Body"),
    "x[1].jsonl": ([{"inputs": "is it?", "targets": "it is"}], "question+answer", "inputs targets"),
    "x1.jsonl": ([{"article_text": "some words"}], "text", "article_text"),
    "it's $HOME *.json": ([{"Prompt": "def f", "canonical_solution": "  return 1"}] * 2, "prompt+completion", ""),
    "rows.parquet": ([{"Dialogue": question_and_answer("Hi!", "Hello.")}], "messages", "Dialogue"),
    "csv.json": ([{"Query; text": "how?", "Response (final)": "so"}], "question+answer", ""),
    "-line\n.jsonl": ([{"token_ids": [1, 2, 3]}], "input_ids", "token_ids"),
}


def _in_shell(line: str) -> list[str]:
    """The words of what is pasted into a POSIX shell, in a folder with nothing to expand to."""
    ran = subprocess.run(["/bin/sh", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True, cwd="/")
    return ran.stdout.decode().split("\0")[:-1]


@pytest.fixture
def odd(command: Run) -> Run:
    """Run `chunkplan ARGUMENTS` beside a folder with all that is `ODD`, and one file that can be read as it is."""
    for name, (records, _, _) in ODD.items():
        path = Path("odd", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(records), path)
        elif name.endswith(".json"):
            path.write_text(json.dumps(records))
        else:
            write(str(path), *records)
    write("odd/good.jsonl", {"text": "some words"})
    return command


@pytest.mark.parametrize("words", [(), ("--on-error", "skip")])
def test_the_line_for_all_sources_that_no_schema_fits_works_in_a_shell(odd: Run, words: tuple[str, ...]) -> None:
    ran = odd("analyze", "odd", "--tokenizer", TOKENIZER, *words)
    assert ran.code == (0 if words else 3)
    [line] = [line.partition("try this: ")[2] for line in ran.err.splitlines() if "try this: " in line]
    again = odd("analyze", "odd", "--tokenizer", TOKENIZER, *_in_shell(line), "--json")
    assert again.code == 0, again.err
    assert "cannot be read" not in again.err
    read = {source["path"].removeprefix("odd/"): source for source in json.loads(again.out)["sources"]}
    for name, (records, schema, keys) in ODD.items():
        source = read[name.replace("\n", "\\n")]
        assert (source["schema"], source["records"], source["rejected"]) == (schema, len(records), 0), name
        assert set(keys.split()) <= set(source["columns"].values()), name


@pytest.mark.parametrize("name", ODD)
def test_the_line_for_one_source_works_in_a_shell_alone_and_beside_another(odd: Run, name: str) -> None:
    for data in ([f"odd/{name}"], [f"odd/{name}", "odd/good.jsonl"]):
        ran = odd("analyze", *data, "--tokenizer", TOKENIZER)
        assert ran.code == 3
        again = odd("analyze", *data, "--tokenizer", TOKENIZER, *_in_shell(ran.err.partition("try this: ")[2]))
        assert again.code == 0, again.err


def test_flags_to_choose_from_name_their_source_where_there_are_several(run: Run) -> None:
    write("a folder/two.jsonl", {"length": 5, "num_tokens": 6})
    write("a folder/counts.jsonl", {"n_tokens": 5, "token_count": 6})
    write("a folder/mixed.jsonl", {"text": "a"}, {"messages": question_and_answer("a", "b")})
    ran = run("analyze", "a folder", *MAPPING)
    assert ran.code == 3
    choices = dict(re.findall(r"/(\w+)\.jsonl: .*; say which: (.*)", ran.err))
    assert set(choices) == {"two", "counts"}
    Path("a folder/mixed.jsonl").unlink()
    for picked in zip(*(choices[name].split(", or ") for name in choices), strict=True):
        again = run("analyze", "a folder", *MAPPING, *(word for line in picked for word in _in_shell(line)))
        assert again.code == 0, again.err
    skipped = run("analyze", "a folder", *MAPPING, "--on-error", "skip").err
    assert [f"hint: a folder/{name}.jsonl: say which: {choices[name]}" in skipped for name in choices] == [True, True]
    write("a folder/mixed.jsonl", {"text": "a"}, {"messages": question_and_answer("a", "b")})
    (Path("a folder") / "two.jsonl").unlink()
    (Path("a folder") / "counts.jsonl").unlink()
    hint = run("analyze", "a folder", *MAPPING).err.partition("\nhint: ")[2]
    assert "with --format mixed.jsonl=NAME, or name the keys with --column mixed.jsonl:ROLE=KEY" in hint


def test_a_source_that_no_flag_can_name_alone_is_to_be_renamed(run: Run) -> None:
    for name, key in (("a=b.jsonl", "story"), ("a<b.jsonl", "body")):
        write(f"a folder/{name}", {key: "some words"})
    hint = run("analyze", "a folder", *MAPPING).err.partition("\nhint: ")[2]
    assert hint.endswith("; for 1 of them try this: --column 'a<b.jsonl:text=body'\n")
    write("a folder/a<b.jsonl", {"text": "some words"})
    hint = run("analyze", "a folder", *MAPPING).err.partition("\nhint: ")[2]
    assert hint.endswith("; rename this file, which no flag can name without naming another\n")


def test_the_line_is_for_sources_that_the_error_names(run: Run) -> None:
    """Of the others nothing is pasted unseen: they come next."""
    for number in range(60):
        write(f"a folder/{number:02}.jsonl", {f"body_{number}": "some words"})
    error = run("analyze", "a folder", *MAPPING).err
    number, line = re.findall(r"; for (\d+) of them try this: (.*)", error)[0]
    named = re.findall(r"^  a folder/(.*?): ", error, re.MULTILINE)
    assert [word.partition(":")[0] for word in _in_shell(line)[1::2]] == named
    assert (int(number), "and 48 more" in error) == (12, True)
    again = run("analyze", "a folder", *MAPPING, *_in_shell(line)).err
    assert again.startswith("error: 48 of 62 sources cannot be read")


def test_sources_of_the_same_keys_are_named_by_what_their_names_have_in_common(run: Run) -> None:
    for number in range(1, 31):
        write(f"a folder/f{number}.jsonl", {"q": "is it so?", "a": "it is so"})
    for other in ("ok.jsonl", "good.jsonl", "f.jsonl"):
        write(f"a folder/{other}", {"text": "some words"})
        hint = run("analyze", "a folder", "--tokenizer", TOKENIZER, *MAPPING).err.partition("try this: ")[2]
        name = "f[0-9]*.jsonl" if other == "f.jsonl" else "f*.jsonl"
        assert hint == f"--column '{name}:question=q' --column '{name}:answer=a'\n"
        assert run("analyze", "a folder", "--tokenizer", TOKENIZER, *MAPPING, *_in_shell(hint)).code == 0


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
        (("qa.jsonl:words=x",), "--column qa.jsonl:words=x: no schema has such a role"),
    ],
)
def test_a_mapping_that_makes_no_sense_is_refused(run: Run, words: tuple[str, ...], message: str) -> None:
    ran = run("analyze", "a folder", *(part for word in words for part in ("--column", word)))
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert "\nhint: " in ran.err
