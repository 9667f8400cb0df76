"""CSV and TSV, and texts between separators: every row and every text is a record, whatever blocks they are read in."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan import IntakeOptions, analyze
from chunkplan.errors import DataError
from chunkplan.intake.one_record import find_record, read_place
from chunkplan.intake.readers.delimited import rows_of_csv, split_texts
from chunkplan.intake.records import RecordError, TextRecord
from chunkplan.intake.sources import SourceFile
from tests.support.intake_checks import marked_texts
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"

_TEXT = st.text(st.sampled_from('a ,"\n\r\tü\\\x01'), max_size=6)


def _blocks(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@given(
    rows=st.lists(st.tuples(_TEXT, _TEXT), min_size=1, max_size=6),
    size=st.integers(1, 40),
    kind=st.sampled_from([("csv", ","), ("tsv", "\t"), ("csv", ";")]),
)
def test_rows_are_what_the_csv_module_wrote(rows: list[tuple[str, str]], size: int, kind: tuple[str, str]) -> None:
    written = io.StringIO()
    csv.writer(written, delimiter=kind[1]).writerows([("prompt", "completion"), *rows])
    file = SourceFile("a", kind[0], None, None)
    lines = b"".join(rows_of_csv(iter(_blocks(written.getvalue().encode(), size)), file)).splitlines()
    assert [tuple(json.loads(line).values()) for line in lines] == rows


@given(
    texts=st.lists(_TEXT, min_size=1, max_size=6),
    separator=st.sampled_from(["line", "\n\n", "<|end|>", "ü"]),
    size=st.integers(1, 40),
)
def test_texts_are_those_between_separators(texts: list[str], separator: str, size: int) -> None:
    whole = ("\n" if separator == "line" else separator).join(texts)
    expected = whole.replace("\r\n", "\n").split("\n") if separator == "line" else whole.split(separator)
    lines = b"".join(split_texts(iter(_blocks(whole.encode(), size)), separator)).split(b"\n")
    found = [json.loads(line)["text"] if line else "" for line in lines]
    assert [one for one in found if one.strip()] == [one for one in expected if one.strip()]
    assert [bool(one.strip()) for one in found[: len(expected)]] == [bool(one.strip()) for one in expected]


def test_csv_and_tsv_are_trained_as_json_lines_of_the_same_texts_are(tmp_path: Path) -> None:
    rows = [("Add 1, 2", "3"), ('Say "a"', "a\nb"), ("007", "true")]
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t"), ("b.csv", ";")):
        with (tmp_path / name).open("w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows([("question", "answer"), *rows])
    lines = [json.dumps({"question": one, "answer": other}) for one, other in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    names = ("a.csv", "a.tsv", "b.csv", "a.jsonl")
    found = [analyze(tmp_path / name, tmp_path / f"of-{name}", tokenizer=TOKENIZER) for name in names]
    assert len({one.manifest["content_hash"] for one in found}) == 1
    assert [one.manifest["sources"][0]["format"] for one in found] == ["csv", "tsv", "csv", "jsonl"]


def test_a_table_of_lengths_and_labels_of_answers_are_no_texts(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("length,id\n12,a\n7,b\n")
    assert analyze(tmp_path / "lengths.csv", tmp_path / "of-lengths").num_tokens.tolist() == [12, 7]
    (tmp_path / "kto.csv").write_text("prompt,completion,label\na,b,True\na,c,False\n")
    with pytest.raises(DataError, match=r"`label` is false: a bad answer"):
        analyze(tmp_path / "kto.csv", tmp_path / "of-kto", tokenizer=TOKENIZER)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,completion\na,b\nc\n", "line 3 has 1 cells, and the first line names 2 columns"),
        (b"prompt,prompt\na,b\n", "several columns of the same name"),
        (b"\na,b\n", "its first line names no column"),
        (b'prompt,completion\na,"b\n', "not csv: unexpected end of data at line 2"),
        ("prompt,completion\na,grün\n".encode("latin-1"), "not UTF-8: byte 0xfc"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        analyze(tmp_path / "a.csv", tmp_path / "out", tokenizer=TOKENIZER)


def test_a_text_of_lines_is_a_record_each_and_ends_with_the_token_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst\r\n\r\n  second\nthird")
    whole = analyze(tmp_path / "a.txt", tmp_path / "whole", tokenizer=TOKENIZER)
    options = IntakeOptions(text_split="line", text_end="eos")
    lines = analyze(tmp_path / "a.txt", tmp_path / "lines", options, tokenizer=TOKENIZER)
    assert len(whole.num_tokens) == 1
    ended = [text.replace("⟦", "") for text in marked_texts(lines)]
    assert ended == [f"{text}<|im_end|>⟧" for text in ("first", "  second", "third")]


def test_a_record_of_a_split_text_is_found_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\ntwo\xff\n\nthree")
    options = IntakeOptions(text_split="\n\n")
    assert find_record(read_place(f"{path}, record 2"), options).read == TextRecord("three")
    broken = find_record(read_place(f"{path}, record 1"), options).read
    assert isinstance(broken, RecordError) and broken.reason == "not-utf8"
