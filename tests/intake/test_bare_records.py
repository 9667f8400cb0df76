"""Lines that are nothing but a list of messages, and objects that are written over several lines: records as well."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from chunkplan import analyze
from chunkplan.intake.readers.streams import objects
from chunkplan.intake.records import RecordError
from tests.support.command_line import Run
from tests.support.intake_checks import ANSWERED, chat, marked_texts, question_and_answer
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"

MESSAGES = question_and_answer("Hi!", "Hello.")
TURNS = question_and_answer("Hi!", "Hello.", who="from", what="value")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", "".join(json.dumps(some) + "\n" for some in (MESSAGES, TURNS))),
        ("x.jsonl", "".join(json.dumps(some) + "\n" for some in (chat(*MESSAGES), TURNS))),
        ("x.json", json.dumps([MESSAGES, TURNS])),
        ("x.json", json.dumps([MESSAGES, chat(*TURNS)], indent=2)),
        ("x.json", "\n".join(json.dumps(chat(*some), indent=2) for some in (MESSAGES, TURNS))),
        ("x.json", "\ufeff" + "".join(json.dumps({"messages": some}, indent=0) for some in (MESSAGES, TURNS)) + "\r\n"),
    ],
)
def test_bare_lists_of_messages_and_objects_over_several_lines_are_records(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert marked_texts(analyze(tmp_path / name, tmp_path / "out", tokenizer=TOKENIZER)) == [ANSWERED, ANSWERED]


def test_one_object_over_several_lines_is_one_record(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for indent in (0, 4):
        path.write_text(json.dumps({"more": {"brackets": '{"}[\\"'}, "text": "a b"}, indent=indent))
        assert marked_texts(analyze(path, tmp_path / "out", tokenizer=TOKENIZER)) == ["a⟦ b⟧"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "found a list"),
        ('[{"text": "a"}]', "found a list"),
        (json.dumps([*MESSAGES, {"content": "a"}]), "found a list"),
        (json.dumps([*MESSAGES, 1]), "found a list"),
        ('[{"role": "user", "content": "a", "content": "b"}]', 'the key "content" is there twice'),
        (json.dumps([{"role": "user", "content": 1}]), "`messages[0].content` is a number"),
    ],
)
def test_a_list_that_is_no_list_of_messages_is_refused(line: str, message: str, command: Run) -> None:
    Path("x.jsonl").write_text(f"{json.dumps(chat(*MESSAGES))}\n{line}\n")
    assert f"error: x.jsonl:2: {message}" in command("analyze", "x.jsonl", "--tokenizer", TOKENIZER).err


def _in_blocks(data: bytes, size: int) -> Iterator[bytes]:
    yield from (data[start : start + size] for start in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_objects_are_told_apart_wherever_a_block_ends(size: int) -> None:
    values = [{"a": '}{"\\', "b": [1, {"c": "\n"}]}, {}, {"d": {"e": [[]]}}]
    data = b"".join(json.dumps(value, indent=2).encode() + b"\n \r\n" for value in values)
    lines = b"".join(objects(_in_blocks(data, size), "x.json")).splitlines(keepends=True)
    assert [json.loads(line) for line in b"".join(lines).split(b"\n") if line] == values
    for broken, message in (
        (b'{"a": 1}, {"b": 2}', "expected `{` of object 1, found `,`"),
        (b'{"a": 1} 7', "expected `{` of object 1, found `7`"),
        (b'{"a": 1} {"b": [2', "expected `}` at the end of object 1, found the end of the file"),
        (b'{"a": 1]', "expected `}` at the end of object 0, found `]`"),
        (b'{"a": 1}}', "expected `{` of object 1, found `}`"),
    ):
        with pytest.raises(RecordError) as caught:
            list(objects(_in_blocks(broken, size), "x.json"))
        assert caught.value.message.startswith(message)
        assert caught.value.reason == "unreadable"


def test_objects_before_damage_are_read(command: Run) -> None:
    whole = json.dumps({"text": "a b c"}, indent=1)
    Path("x.json").write_text(f"{whole}\n{whole},\n{whole}")
    ran = command("analyze", "x.json", "--tokenizer", TOKENIZER)
    assert ran.err.startswith("error: x.json: expected `{` of object 2, found `,`; objects are counted from 0\n")
    ran = command("analyze", "x.json", "--tokenizer", TOKENIZER, "--on-error", "skip")
    assert (ran.code, "3 records = 2 sequences + 1 rejected" in ran.err) == (0, True)
