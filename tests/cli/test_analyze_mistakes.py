"""Mistakes with `chunkplan analyze` and `chunkplan merge`: each gets a message, a hint and its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from chunkplan.planfile.load import load_analysis
from tests.support.analyze_cases import analyzed, write
from tests.support.command_line import Run
from tests.support.places import ROOT


@pytest.fixture
def run(command: Run) -> Run:
    """Run `chunkplan ARGUMENTS` in a folder with `dataset.jsonl` in it."""
    write("dataset.jsonl", *({"text": "word " * 3**power} for power in range(10)))
    return command


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("missing.jsonl",), 2, "there is no file missing.jsonl"),
        (("dataset.jsonl", "data.xlsx"), 2, "data.xlsx has a suffix that is not known"),
        (("*.arrow",), 2, "no data matches *.arrow"),
        (("-", "-"), 2, "the standard input can be read once"),
        (("nowhere://bucket/a.jsonl",), 2, "is no address"),
        (("pairs.jsonl",), 3, "pairs.jsonl:2: `rejected` is missing, expected an answer"),
        (("unknown.jsonl",), 3, "no schema fits the keys of the records: `foo` in 1 of 1"),
        (("empty.jsonl",), 3, "empty.jsonl: "),
        (("torn.parquet",), 3, "torn.parquet: "),
        (("cut.jsonl.gz",), 3, "cut.jsonl.gz: "),
        (("dataset.jsonl", "--tokenizer", "missing/tokenizer.json"), 2, "there is no tokenizer at missing"),
        (("dataset.jsonl", "--tokenizer", "data.xlsx"), 3, "data.xlsx: not JSON"),
        (("dataset.jsonl", "--chat-template", "x.jinja"), 2, "a chat template without a tokenizer"),
        (("dataset.jsonl", "--text-end", "eos"), 2, "--text-end eos without a tokenizer"),
        (("dataset.jsonl", "--template-kwargs", "a=1"), 2, "--template-kwargs without a tokenizer"),
        (("dataset.jsonl", "--text-split", "line"), 2, "--text-split, and no source is a text (.txt)"),
        (("dataset.jsonl", "--format", "chat"), 2, "--format is 'chat', expected one of text, "),
        (("dataset.jsonl", "--format", "messages"), 3, "--format messages expects `messages` or `contents`"),
        (("dataset.jsonl", "--column", "text"), 2, "--column is 'text', expected ROLE=KEY"),
        (("dataset.jsonl", "--column", "words=text"), 2, "--column words=text: no schema has such a role"),
        (("dataset.jsonl", "--column", "text=a", "--column", "text=b"), 2, "two columns for the role text"),
        (("dataset.jsonl", "--length-column", "n"), 3, "no record has the key `n`"),
        (("dataset.jsonl", "--overlong", "drop"), 2, "--overlong drop without a maximum length"),
        (
            ("dataset.jsonl", "--max-length", "5", "--overlong", "cut"),
            2,
            "--overlong is 'cut', expected error or drop or truncate",
        ),
        (("dataset.jsonl", "--on-error", "ignore"), 2, "--on-error is 'ignore', expected stop or skip"),
        (("dataset.jsonl", "--max-length", "0"), 2, "--max-length is 0, expected a number of tokens from 1"),
        (("dataset.jsonl", "--sample", "1"), 2, "--sample is 1.0, expected a share between 0 and 1"),
        (("dataset.jsonl", "--sample", "nan"), 2, "--sample is nan, expected a share between 0 and 1"),
        (("dataset.jsonl", "--kto-negatives", "some"), 2, "--kto-negatives is 'some', expected error or drop or keep"),
        (("dataset.jsonl", "--max-record-mb", "0"), 2, "--max-record-mb is 0, expected"),
        (("dataset.jsonl", "--max-record-mb", "nan"), 2, "--max-record-mb is 'nan', expected"),
        (("dataset.jsonl", "--max-record-mb", "inf"), 2, "--max-record-mb is 'inf', expected"),
        (("dataset.jsonl", "--workers", "0"), 2, "--workers is 0, expected a whole number from 1"),
        (("dataset.jsonl", "--workers", "two"), 2, "--workers is 'two', expected a whole number from 1"),
        (("dataset.jsonl", "--shard", "0/2"), 2, "--shard is '0/2', expected I/N"),
        (("dataset.jsonl", "--shard", "half"), 2, "--shard is 'half', expected I/N"),
        (("dataset.jsonl", "--output", "data.xlsx"), 2, "data.xlsx"),
        (("dataset.jsonl", "--output", "."), 2, ". is the current folder"),
        ((), 2, "Missing argument"),
    ],
)
def test_a_mistake_gets_a_message_a_hint_and_its_exit_code(
    run: Run, arguments: tuple[str, ...], code: int, message: str
) -> None:
    write("data.xlsx", "a,b")
    Path("pairs.jsonl").write_text('{"prompt": "p", "chosen": "c", "rejected": "r"}\n{"prompt": "p", "chosen": "c"}\n')
    write("unknown.jsonl", {"foo": 1})
    for name, content in (("empty.jsonl", b""), ("torn.parquet", b"PAR1 and no more"), ("cut.jsonl.gz", b"\x1f\x8b")):
        Path(name).write_bytes(content)
    ran = run("analyze", *arguments)
    assert (ran.code, ran.out) == (code, ""), ran.err
    assert ran.err.startswith("error: ")
    assert message in ran.err
    assert "\nhint: " in ran.err
    assert not Path("chunkplan-out/analysis").exists()


def test_a_mistake_of_merge_gets_a_message_too(run: Run) -> None:
    for arguments, message in (
        (("nothing",), "nothing is no shard of an analysis"),
        (("chunkplan-out/analysis",), "is of kind analysis"),
        ((), "Missing argument"),
    ):
        analyzed(run, "dataset.jsonl")
        ran = run("merge", *arguments)
        assert (ran.code, ran.out) == (2, "")
        assert message in ran.err
        assert "hint: " in ran.err


def test_sources_of_which_every_record_is_bad_are_named_in_the_warning_as_well(command: Run, tmp_path: Path) -> None:
    """Their records are counted each; what can be read and is blank is no such source."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "bin.jsonl").write_bytes(b"\x80\x01\n\x99\nnull\n")
    (data / "blank.jsonl").write_text('{"text": " "}\n')
    (data / "cut.json").write_text('[{"text": "a')
    (data / "good.jsonl").write_text('{"text": "good"}\n')
    (data / "null.jsonl").write_text("null\n")
    ran = command("analyze", "data", "--tokenizer", ROOT / "sample_data" / "tokenizer", "--on-error", "skip")
    assert ran.code == 0
    assert "warning: 3 sources cannot be read and are left out:" in ran.err
    assert "data/bin.jsonl: 3 records, each rejected (1 not-an-object, 2 not-utf8)" in ran.err
    assert "data/cut.json: expected `,` or `]`" in ran.err
    assert "data/null.jsonl: 1 record, which is rejected (1 not-an-object)" in ran.err
    assert "read data/blank.jsonl: text, 1 record, 1 rejected" in ran.err
    assert "read data/bin.jsonl" not in ran.err


def test_a_file_that_is_given_twice_is_read_twice_and_that_is_said(run: Run) -> None:
    write("other.jsonl", {"text": "once"})
    ran = run("analyze", "dataset.jsonl", "./dataset.jsonl", "other.jsonl")
    [said] = [line for line in ran.err.splitlines() if "read each time that it is given" in line]
    assert said.endswith(": dataset.jsonl, ./dataset.jsonl")
    assert len(load_analysis(Path("chunkplan-out/analysis")).num_tokens) == 21
    assert "each time" not in run("analyze", "dataset.jsonl", "other.jsonl").err
