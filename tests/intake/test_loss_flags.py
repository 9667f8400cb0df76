"""Flags of messages and of records that say what counts in the loss are honoured as their programs mean them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chunkplan import IntakeOptions, analyze
from chunkplan.errors import DataError
from chunkplan.intake.records import Conversation, RecordError
from tests.support.intake_checks import ANSWERED, chat, marked_texts, parse_as, question_and_answer, write_lines
from tests.support.places import ROOT
from tests.support.table_cases import write_records

TOKENIZER = ROOT / "sample_data" / "tokenizer"
_UNTRAINED = ANSWERED.replace("⟦", "").replace("⟧", "")

#: Flags whose 1 says that a message counts, and the one whose 1 says that it does not.
COUNTS = (
    *("loss", "loss_weight", "weight", "train", "training", "trainable", "loss_mask", "is_train", "output_with_loss"),
)
NOT = ("masked",)

_LAYOUTS = [("messages", "role", "content"), pytest.param("conversations", "from", "value", marks=pytest.mark.soak)]


def _two(who: str, what: str, *flags: dict[str, Any]) -> list[dict[str, Any]]:
    messages = question_and_answer("Hi!", "Hello.", who=who, what=what) * 2
    return [message | flag for message, flag in zip(messages, flags, strict=True)]


@pytest.mark.parametrize("key", [*COUNTS, *NOT])
@pytest.mark.parametrize(("schema", "who", "what"), _LAYOUTS)
def test_a_message_is_trained_as_its_flag_says_in_every_layout_and_kind_of_file(
    tmp_path: Path, key: str, schema: str, who: str, what: str
) -> None:
    yes: Any = key in COUNTS
    for name in ("x.jsonl", "x.parquet", "x.arrow"):
        for value in (not yes, int(not yes)):
            record = {schema: _two(who, what, {}, {key: value}, {}, {})}
            found = analyze(write_records(tmp_path / name, [record]), tmp_path / "out", tokenizer=TOKENIZER)
            assert marked_texts(found) == [_UNTRAINED + ANSWERED]
            assert found.manifest["sources"][0]["unread_keys"] == {}
    parsed = parse_as(schema, {schema: _two(who, what, {key: yes}, {key: not yes}, {key: None}, {key: yes})})
    assert isinstance(parsed, Conversation)
    assert [message.counts_in_loss for message in parsed.messages] == [True, False, False, True]


def test_a_step_that_counts_is_none_of_the_user() -> None:
    flags = ({"step_loss_mask": 1}, {"step_loss_mask": 0}, {"step_loss_mask": 1}, {"step_loss_mask": 1})
    parsed = parse_as("messages", chat(*_two("role", "content", *flags)))
    assert isinstance(parsed, Conversation)
    assert [message.counts_in_loss for message in parsed.messages] == [False, False, False, True]


@pytest.mark.parametrize("key", ["foo", "should_learn", "label", "score", "thinking", "turn_weight"])
@pytest.mark.parametrize("value", [True, False, 0, 1, 0.5, [0, 1]])
@pytest.mark.parametrize(("schema", "who", "what"), _LAYOUTS)
def test_a_number_or_truth_value_that_nothing_reads_stops_the_run_unless_it_is_ignored(
    tmp_path: Path, key: str, value: Any, schema: str, who: str, what: str
) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{schema: _two(who, what, {}, {key: value}, {}, {})}])
    with pytest.raises(DataError) as caught:
        analyze(path, tmp_path / "out", tokenizer=TOKENIZER)
    assert f"`{schema}[1].{key}` is not read" in caught.value.message
    flag = f"--ignore-column '{schema}[].{key}'"
    assert flag in caught.value.hint
    found = analyze(path, tmp_path / "out", IntakeOptions(ignore_columns=(f"{schema}[].{key}",)), tokenizer=TOKENIZER)
    assert marked_texts(found) == [ANSWERED * 2]
    assert found.manifest["sources"][0]["unread_keys"] == {f"{schema}[].{key}": 1}


def test_what_counts_something_says_when_or_is_read_by_templates_is_no_flag(tmp_path: Path) -> None:
    others = {"id": 3, "turn_index": 0, "created_at": 1.5, "num_tokens": 7, "prefix": False, "mood": "kind"}
    path = write_lines(tmp_path / "x.jsonl", [chat(*_two("role", "content", {}, others, {}, {}))])
    found = analyze(path, tmp_path / "out", tokenizer=TOKENIZER)
    assert marked_texts(found) == [ANSWERED * 2]
    assert found.manifest["sources"][0]["unread_keys"] == {f"messages[].{key}": 1 for key in others if key != "prefix"}


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ({"mask": 1}, "`messages[1].mask` says what counts in the loss, or what does not: programs differ"),
        ({"masked": 0.5}, "`messages[1].masked` is 0.5, expected 0 or 1"),
        ({"trainable": "yes"}, "`messages[1].trainable` is a string, expected 0 or 1"),
        ({"trainable": True, "masked": True}, "`trainable` and `masked` both that it counts and that it does not"),
        ({"content": [{"type": "text", "text": "Hello.", "train": False}]}, "`messages[1].content[0].train` may say"),
        ({"cot": "as usual"}, "`messages[1].cot` has what was thought before an answer"),
        ({"context": "The text."}, "`messages[1].context` is not read, and has text that the model may be given"),
    ],
)
def test_a_flag_of_two_meanings_or_none_is_refused(flag: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        parse_as("messages", chat(*_two("role", "content", {}, flag, {}, {})))
    assert message in caught.value.message
    assert caught.value.hint


_RECORDS: dict[str, dict[str, Any]] = {
    "text": {"text": "Hi! Hello."},
    "messages": {"messages": question_and_answer("Hi!", "Hello.")},
    "conversations": {"conversations": question_and_answer("Hi!", "Hello.", who="from", what="value")},
    "prompt+completion": {"prompt": "Hi!", "completion": "Hello."},
    "instruction": {"instruction": "Hi!", "output": "Hello."},
    "question+answer": {"question": "Hi!", "answer": "Hello."},
}


@pytest.mark.parametrize("schema", _RECORDS)
@pytest.mark.parametrize("key", ["weight", "train", "masked"])
def test_a_record_that_does_not_count_is_left_out_and_counted(tmp_path: Path, schema: str, key: str) -> None:
    yes, no = int(key in COUNTS), int(key not in COUNTS)
    records = [_RECORDS[schema] | {key: value} for value in (yes, no, bool(yes), bool(no))]
    for name in ("x.jsonl", "x.parquet") if key == "weight" else ("x.jsonl",):
        records = records[:2] if name == "x.parquet" else records
        found = analyze(write_records(tmp_path / name, records), tmp_path / "out", tokenizer=TOKENIZER)
        [source] = found.manifest["sources"]
        assert (found.num_sequences, source["reasons"]) == (len(records) // 2, {"untrained": len(records) // 2})
        assert source["unread_keys"] == {}
    with pytest.raises(RecordError, match=f"`{key}` is 0.5, expected 0 or 1") as caught:
        parse_as(schema, _RECORDS[schema] | {key: 0.5})
    assert f"--ignore-column {key}" in caught.value.hint


@pytest.mark.parametrize("key", ["loss_mask", "trainable", "weight", "masked"])
@pytest.mark.parametrize("has_system", [False, True])
def test_a_list_has_a_flag_for_each_message_and_takes_answers_away(tmp_path: Path, key: str, has_system: bool) -> None:
    record: dict[str, Any] = {"conversations": _two("from", "value", {}, {}, {}, {})}
    record |= {"system": "Be brief."} if has_system else {}
    for counts in ([0, 0, 0, 1], [1, 0, True, 1]):
        flags = [bool(one) == (key in COUNTS) for one in counts]
        path = write_lines(tmp_path / "x.jsonl", [record | {key: flags}])
        [text] = marked_texts(analyze(path, tmp_path / "out", tokenizer=TOKENIZER))
        assert text.endswith(_UNTRAINED + ANSWERED)
    longer = [key in COUNTS, *flags]
    if has_system:
        path = write_lines(tmp_path / "x.jsonl", [record | {key: longer}])
        assert marked_texts(analyze(path, tmp_path / "out", tokenizer=TOKENIZER)) == [text]
    else:
        with pytest.raises(RecordError, match=f"`{key}` has 5 entries, and there are 4 messages"):
            parse_as("conversations", record | {key: longer})


@pytest.mark.parametrize(("key", "value"), [("loss_mask", "[0, 1]"), ("weight", "0"), ("train", "False")])
def test_flags_that_are_written_as_text_are_refused(key: str, value: str) -> None:
    for schema, record in _RECORDS.items():
        with pytest.raises(RecordError, match=f"`{key}` is a string, expected 0 or 1"):
            parse_as(schema, record | {key: value})


def test_a_list_beside_a_question_and_its_answer_has_two_and_beside_a_text_none() -> None:
    record = {"instruction": "Hi!", "output": "Hello."}
    assert parse_as("instruction", record | {"loss_mask": [0, 1]}) == parse_as("instruction", record)
    with pytest.raises(RecordError, match="nothing of the record counts") as caught:
        parse_as("instruction", record | {"loss_mask": [1, 0]})
    assert caught.value.reason == "untrained"
    with pytest.raises(RecordError, match="the record has no messages"):
        parse_as("text", {"text": "Hi!", "loss_mask": [1]})
    earlier = parse_as("instruction", record | {"history": [["a", "b"]], "loss_mask": [0, 0, 0, 1]})
    assert isinstance(earlier, Conversation)
    assert [message.counts_in_loss for message in earlier.messages] == [False, False, False, True]


def test_the_speaker_that_nemo_masks_is_the_user_or_refused() -> None:
    record = {"conversations": _two("from", "value", {}, {}, {}, {}), "system": "", "type": "VALUE_TO_TEXT"}
    assert parse_as("conversations", record | {"mask": "User"}) == parse_as("conversations", record)
    for mask in ("Assistant", 1, [0, 1, 0, 1]):
        with pytest.raises(RecordError, match="`mask` says what counts in the loss, or what does not"):
            parse_as("conversations", record | {"mask": mask})


def test_the_answer_of_an_exchange_counts_as_its_flag_says(tmp_path: Path) -> None:
    exchange = {"input": "Hi!", "output": "Hello."}
    record = {"conversation": [exchange | {"output_with_loss": False}, exchange | {"output_with_loss": True}]}
    found = analyze(write_lines(tmp_path / "x.jsonl", [record]), tmp_path / "out", tokenizer=TOKENIZER)
    assert marked_texts(found) == [_UNTRAINED + ANSWERED]


def test_metrics_of_a_text_stop_the_run_and_words_do_not(tmp_path: Path) -> None:
    record = {"text": "Once upon a time.", "loss": 2.25, "train": "yes"}
    path = write_lines(tmp_path / "x.jsonl", [record])
    with pytest.raises(DataError, match=r"`loss` is 2.25, expected 0 or 1"):
        analyze(path, tmp_path / "out", tokenizer=TOKENIZER)
    found = analyze(path, tmp_path / "out", IntakeOptions(ignore_columns=("loss",)), tokenizer=TOKENIZER)
    assert json.loads(json.dumps(found.manifest["sources"][0]["unread_keys"])) == {"loss": 1, "train": 1}
