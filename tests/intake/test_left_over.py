"""What may be given to the model beside what is read is read too, or stops the run; what is about a record does not."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from chunkplan import IntakeOptions, analyze, load_analysis
from chunkplan.errors import DataError
from tests.support.command_line import Run
from tests.support.intake_checks import ANSWERED, marked_texts, parse_as, question_and_answer, write_lines
from tests.support.places import ROOT
from tests.support.table_cases import write_records

TOKENIZER = ROOT / "sample_data" / "tokenizer"

_PAIR = {"question": "Hi!", "answer": "Hello."}
_PROMPT = {"prompt": "Hi!", "completion": "Hello."}
_ALPACA = {"instruction": "Hi!", "input": "", "output": "Hello."}
_CHAT = {"messages": question_and_answer("Hi!", "Hello.")}
_SYSTEM = "<|im_start|>system⏎Be brief.<|im_end|>⏎"
_WITH_INPUT = ANSWERED.replace("Hi!", "Hi!⏎Be brief.")


@pytest.mark.parametrize(
    ("record", "suffixes"),
    [
        (_PAIR, ("jsonl", "parquet")),
        *(
            pytest.param(record, suffixes, marks=pytest.mark.soak)
            for record, suffixes in (
                (_PAIR, ("arrow",)),
                *((record, ("jsonl", "parquet", "arrow")) for record in (_PROMPT, _ALPACA)),
            )
        ),
    ],
)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("context", "Be brief."),
        ("context", "brief"),
        ("contexts", ["Be brief.", "Be."]),
        ("passage", "Be brief."),
        ("documents", [{"title": "a", "text": "b"}]),
        ("choices", ["Be", "brief"]),
        ("hint", "Brief"),
        ("reasoning", "H"),
        ("reasoning_content", "Be brief."),
        ("thinking", "Be brief."),
        ("thought", "Be brief."),
        ("cot", "Be brief."),
        ("chain_of_thought", "Be brief."),
        ("rationale", "Be brief."),
        ("Complex_CoT", "Be brief."),
        ("sys", "Be brief."),
        ("anything", "Be brief."),
        ("提示", "先画图"),
        ("loss_weights", [0.5, 1.0]),
    ],
)
def test_what_may_be_given_beside_a_question_stops_the_run_until_it_is_ignored(
    tmp_path: Path, record: dict[str, Any], suffixes: tuple[str, ...], key: str, value: Any
) -> None:
    expected = marked_texts(
        analyze(write_records(tmp_path / "x.jsonl", [record]), tmp_path / "out", tokenizer=TOKENIZER)
    )
    for suffix in suffixes:
        path = write_records(tmp_path / f"x.{suffix}", [record | {key: value}])
        with pytest.raises(DataError) as caught:
            analyze(path, tmp_path / "out", tokenizer=TOKENIZER)
        assert f"`{key}`" in caught.value.message
        assert f"--ignore-column {shlex.quote(key)}" in caught.value.hint
        found = analyze(path, tmp_path / "out", IntakeOptions(ignore_columns=(key,)), tokenizer=TOKENIZER)
        assert marked_texts(found) == expected
        assert found.manifest["sources"][0]["unread_keys"].keys() == {key}


@pytest.mark.parametrize("record", [_PAIR, _PROMPT, _ALPACA, _CHAT])
def test_what_is_about_a_record_or_says_what_is_read_again_is_only_listed(
    tmp_path: Path, record: dict[str, Any]
) -> None:
    about = {
        "id": "a b",
        "source": "a web site",
        "category": "open qa",
        "lang": "en",
        "url": "https://example.org/a",
        "license": "CC BY 4.0",
        "title": "How to be brief",
        "createdAt": "2024-01-01 10:00:00",
        "seen": "2024-01-01 10:00:00+00:00",
        "uuid": "0000-11",
        "tags": ["a b", "c"],
        "metadata": {"note": "some words"},
        "score": 0.5,
        "is_good": True,
        "verdict": "correct",
        "text": "### Hi! ### Hello.",
        "repeated": "Hello.",
    }
    for name in ("x.jsonl", "x.parquet"):
        found = analyze(write_records(tmp_path / name, [record | about]), tmp_path / "out", tokenizer=TOKENIZER)
        assert found.num_sequences == 1
        assert found.manifest["sources"][0]["unread_keys"].keys() == about.keys()


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (_PAIR | {"context": "Be brief."}, _WITH_INPUT),
        (_PAIR | {"input": "Be brief."}, _WITH_INPUT),
        (_PROMPT | {"context": "Be brief."}, _WITH_INPUT),
        (_ALPACA | {"context": "Be brief."}, _WITH_INPUT),
        (_PAIR | {"sys_prompt": "Be brief."}, _SYSTEM + ANSWERED),
        (_PROMPT | {"sys_prompt": "Be brief."}, _SYSTEM + ANSWERED),
        (_CHAT | {"my_system": "Be brief."}, _SYSTEM + ANSWERED),
    ],
)
def test_the_options_of_the_hint_read_all_of_it(command: Run, record: dict[str, Any], expected: str) -> None:
    write_lines(Path("x.jsonl"), [record])
    refused = command("analyze", "x.jsonl", "--tokenizer", TOKENIZER)
    assert refused.code == 3
    [line] = re.findall(r"hint: ((?:--column \S+ )+)reads it", " ".join(refused.err.split()))
    command("analyze", "x.jsonl", "--tokenizer", TOKENIZER, *shlex.split(line))
    found = load_analysis(Path("chunkplan-out/analysis"))
    assert marked_texts(found) == [expected]
    assert found.manifest["sources"][0]["unread_keys"].keys() <= {"input"}  # which is blank


@pytest.mark.parametrize(
    "key", ["system", "system_prompt", "system_message", "system_instruction", "systemInstruction"]
)
@pytest.mark.parametrize("record", [_PAIR, _ALPACA, _CHAT])
def test_a_system_text_is_honoured_under_each_of_its_names(tmp_path: Path, key: str, record: dict[str, Any]) -> None:
    expected = [_SYSTEM + ANSWERED]
    for name in ("x.jsonl", "x.parquet"):
        for others in ({}, {"system": None}, {"system": "Be brief."}):
            path = write_records(tmp_path / name, [record | others | {key: "Be brief."}])
            found = analyze(path, tmp_path / "out", tokenizer=TOKENIZER)
            assert marked_texts(found) == expected
    if key != "system":
        path = write_records(tmp_path / "x.jsonl", [record | {"system": " ", key: "Be brief."}])
        assert marked_texts(analyze(path, tmp_path / "out", tokenizer=TOKENIZER)) == expected
        with pytest.raises(DataError, match=f"`{key}` beside"):
            analyze(write_records(path, [record | {"system": "Be long.", key: "Be brief."}]), tmp_path / "out")


@pytest.mark.parametrize("key", ["context", "documents", "reasoning", "knowledge", "system_hint"])
def test_beside_messages_what_has_the_name_of_what_is_given_stops_the_run(tmp_path: Path, key: str) -> None:
    for name in ("x.jsonl", "x.parquet"):
        with pytest.raises(DataError, match=f"`{key}` beside the messages"):
            analyze(write_records(tmp_path / name, [_CHAT | {key: "Be brief."}]), tmp_path / "out")
        found = analyze(write_records(tmp_path / name, [_CHAT | {key: "on", "prompt": "Be brief."}]), tmp_path / "out")
        assert found.manifest["sources"][0]["unread_keys"].keys() == {key, "prompt"}


def test_reasoning_in_a_sharegpt_message_is_given_to_the_template() -> None:
    said = [{"from": "human", "value": "Hi!"}, {"from": "gpt", "value": "Hello.", "reasoning_content": "Greet."}]
    as_messages = question_and_answer("Hi!", "Hello.")
    as_messages[1]["reasoning_content"] = "Greet."
    assert parse_as("conversations", {"conversations": said}) == parse_as("messages", {"messages": as_messages})


_TREE = {"message_id": "b", "text": "It is four.", "lang": "en", "deleted": False, "review_result": True, "rank": 0}


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
@pytest.mark.parametrize(
    ("records", "hint"),
    [
        (
            [{**_TREE, "parent_id": None, "role": "prompter"}, {**_TREE, "parent_id": "a", "role": "assistant"}],
            "one message of a tree (`parent_id`)",
        ),
        ([{"message_tree_id": "a", "role": "assistant", "text": "Vier."}], "one message of a tree (`message_tree_id`)"),
        ([{"conversation_id": 1, "speaker": "Bot", "text": "Hello."}], "a record is one message"),
    ],
)
def test_a_row_that_is_one_message_is_no_text(
    tmp_path: Path, name: str, records: list[dict[str, Any]], hint: str
) -> None:
    path = write_records(tmp_path / name, records)
    with pytest.raises(DataError, match="no schema fits") as caught:
        analyze(path, tmp_path / "out", tokenizer=TOKENIZER)
    assert hint in caught.value.hint
    found = analyze(path, tmp_path / "out", IntakeOptions(schema="text"), tokenizer=TOKENIZER)
    assert found.num_sequences == len(records)  # who wants it may have it


def test_a_record_far_behind_stops_the_run_at_its_line(command: Run) -> None:
    write_lines(Path("x.jsonl"), [_PAIR] * 150 + [_PAIR | {"context": "Be brief."}])
    ran = command("analyze", "x.jsonl", "--tokenizer", TOKENIZER)
    assert ran.code == 3
    assert "x.jsonl:151: `context` beside a question and its answer" in " ".join(ran.err.split())
    skipped = command("analyze", "x.jsonl", "--tokenizer", TOKENIZER, "--on-error", "skip")
    assert (skipped.code, "150  1 rejected: unsupported" in skipped.out) == (0, True)
