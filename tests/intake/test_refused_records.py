"""Records that do not fit, are more than text or have nothing to train on are refused, by the user's own key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunkplan import analyze
from chunkplan.errors import DataError
from chunkplan.intake.records import RecordError
from tests.support.intake_checks import chat, parse_as, write_lines


def _user(content: Any, **others: Any) -> dict[str, Any]:
    return chat({"role": "user", "content": content, **others})


@pytest.mark.parametrize(
    ("schema", "record", "message"),
    [
        ("text", {"txt": "a"}, "`text` is missing, expected a string, found the keys `txt`"),
        ("text", {"text": None}, "`text` is null, expected a string"),
        ("prompt+completion", {"prompt": "a", "completion": 1}, "`completion` is a number, expected a string"),
        ("prompt+completion", {"prompt": "a", "completion": [1]}, "expected two strings or two lists of messages"),
        ("prompt+completion", {"prompt": [{}], "completion": [{}]}, "`prompt[0].role` is missing"),
        ("messages", {"messages": "a"}, "`messages` is a string, expected a list"),
        ("messages", chat("a"), "`messages[0]` is a string, expected an object"),
        ("messages", chat({"content": "a"}), "`messages[0].role` is missing"),
        ("messages", _user(1), "`messages[0].content` is a number, expected a string"),
        ("messages", chat({"role": "assistant", "content": None}), "`messages[0].content` is null and there are no"),
        ("messages", chat({"role": "user"}), "`messages[0].content` is missing and there are no `tool_calls`"),
        (
            "messages",
            _user([{"type": "tool_call", "value": "{"}]),
            "`messages[0].content[0].value` is a string that is",
        ),
        ("messages", _user([{"type": "tool_call", "value": [1]}]), "expected an object with `name` and `arguments`"),
        ("messages", _user([{"text": "a"}]), "`messages[0].content[0].type` is missing"),
        ("messages", _user("a", weight="1"), "`messages[0].weight` is a string"),
        ("messages", _user("a", loss=False, weight=1), "`loss` and `weight` both that it counts and that it does not"),
        ("messages", chat({"role": "user", "content": "a"}, tools={}), "`tools` is an object, expected a list"),
        ("messages", chat({"role": "user", "content": "a"}, tools="{}"), "an object written as JSON, expected a list"),
        (
            "messages",
            chat({"role": "user", "content": "a"}, tools=[{}, "{}"]),
            "`tools[1]` is a string, expected an object",
        ),
        ("messages", chat({"role": "user", "content": "a"}, tools="x"), "`tools` is a string that is not JSON"),
        ("conversations", {"conversations": [{"from": "who", "value": "a"}]}, '`conversations[0].from` is "who"'),
        ("conversations", {"conversations": [{"from": ["gpt"], "value": "a"}]}, "`conversations[0].from` is a list"),
        ("conversations", {"conversations": [{"from": "gpt"}]}, "`conversations[0].value` is missing"),
        ("conversations", {"conversations": [{"from": "gpt", "value": []}]}, "`conversations[0].value` is a list"),
        ("instruction", {"instruction": "a", "output": None}, "`output` is null"),
        ("instruction", {"instruction": "a", "output": "b", "input": 3}, "`input` is a number"),
        ("question+answer", {"question": "a"}, "`answer` is missing"),
        ("input_ids", {"ids": [1]}, "`input_ids` is missing, expected a list of token ids, found the keys `ids`"),
        ("input_ids", {"input_ids": "1 2"}, "`input_ids` is a string, expected a list"),
        ("input_ids", {"input_ids": [1, -2]}, "`input_ids[1]` is -2, expected a token id"),
        ("input_ids", {"input_ids": [1, 2**31]}, "`input_ids[1]` is 2147483648, which is more than 32 bits"),
        ("input_ids", {"input_ids": [1, 2.0]}, "`input_ids[1]` is a number, expected a whole number"),
        ("input_ids", {"input_ids": [1, True]}, "`input_ids[1]` is a boolean, expected a whole number"),
        ("input_ids", {"input_ids": [1, 2], "labels": [1]}, "`labels` has 1 entries and `input_ids` has 2"),
        ("input_ids", {"input_ids": [1, 2], "labels": [2, -100]}, "`labels[0]` is 2 and `input_ids[0]` is 1"),
        ("input_ids", {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "`attention_mask[1]` is 0 between ones"),
        ("input_ids", {"input_ids": [1, 2], "attention_mask": [1, 3]}, "`attention_mask[1]` is 3, expected 0 or 1"),
        ("length", {"length": 2.0}, "`length` is 2.0, expected a whole number"),
        ("length", {"length": True}, "`length` is a boolean"),
        ("length", {"length": 2**31}, "`length` is 2147483648, expected 1 to 2147483647"),
        ("length", {"length": -1}, "`length` is -1"),
        ("length", {}, "`length` is missing"),
    ],
)
def test_a_record_that_does_not_fit_says_which_key_and_what_was_found(
    schema: str, record: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecordError) as caught:
        parse_as(schema, record)
    assert caught.value.reason == "schema"
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("schema", "record", "message"),
    [
        ("messages", _user("a", loss_weight=0.5), "`messages[0].loss_weight` is 0.5, expected 0 or 1"),
        ("messages", _user("a", loss=2), "`messages[0].loss` is 2"),
        (
            "messages",
            _user([{"type": "image_url", "image_url": "x"}]),
            '`messages[0].content[0]` is a part of type "image_url"',
        ),
        (
            "messages",
            _user([{"type": "text", "text": "a"}, {"type": "audio"}]),
            '`messages[0].content[1]` is a part of type "audio"',
        ),
        ("text", {"text": "t", "chosen": "b", "rejected": "c"}, "preference pair"),
        ("messages", {"messages": [], "chosen": [], "rejected": []}, "preference pair"),
        ("messages", {**_user("a <image>"), "images": ["x.png"]}, "`images` beside the text"),
        ("text", {"text": "t", "video": {"bytes": ""}}, "`video` beside the text"),
        (
            "prompt+completion",
            {"prompt": "a", "completion": "b", "history": [["c", "d"]]},
            "`history` has earlier exchanges",
        ),
    ],
)
def test_what_is_not_planned_is_refused_by_name(schema: str, record: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        parse_as(schema, record)
    assert caught.value.reason == "unsupported"
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("schema", "record"),
    [
        ("text", {"text": ""}),
        ("text", {"text": " \n\u2003"}),
        ("prompt+completion", {"prompt": "", "completion": " "}),
        ("prompt+completion", {"prompt": [], "completion": []}),
        ("messages", chat()),
        ("messages", chat({"role": "user", "content": ""}, {"role": "assistant", "content": []})),
        ("messages", _user("\n")),
        ("conversations", {"conversations": [], "system": "a"}),
        ("instruction", {"instruction": "", "output": " "}),
        ("question+answer", {"question": "", "answer": ""}),
        ("input_ids", {"input_ids": []}),
        ("input_ids", {"input_ids": [1], "attention_mask": [0]}),
        ("length", {"length": 0}),
    ],
)
def test_what_has_nothing_to_train_on_is_empty(schema: str, record: dict[str, Any]) -> None:
    with pytest.raises(RecordError) as caught:
        parse_as(schema, record)
    assert caught.value.reason == "empty"


def test_media_in_a_message_are_refused_by_name() -> None:
    with pytest.raises(RecordError, match=r"`messages\[0\]\.images`") as caught:
        parse_as("messages", chat({"role": "user", "content": "x", "images": ["a.png"]}))
    assert caught.value.reason == "unsupported"


def test_a_call_nested_too_deeply_to_be_written_is_rejected() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(RecordError) as caught:
        parse_as("conversations", {"conversations": [{"from": "function_call", "value": value}]})
    assert caught.value.reason == "too-deep"


def test_texts_in_turn_and_a_rejected_answer_get_what_to_type(tmp_path: Path) -> None:
    lima = write_lines(tmp_path / "lima.jsonl", [{"conversations": ["Hi?", "Yes."]}])
    with pytest.raises(DataError, match="expected an object that says who speaks") as caught:
        analyze(lima, tmp_path / "out")
    assert "jq -c" in caught.value.hint
    pair = {"prompt": "Hi!", "response": "Hello there.", "rejected": "Go away."}
    paths = [write_lines(tmp_path / "pair.jsonl", [pair]), tmp_path / "pair.parquet"]
    pq.write_table(pa.Table.from_pylist([pair]), paths[1])
    for path in paths:
        with pytest.raises(DataError, match="a preference pair") as caught:
            analyze(path, tmp_path / "out")
        assert "--ignore-column rejected" in caught.value.hint
    rated = write_lines(tmp_path / "rated.jsonl", [{**pair, "rejected": False}])
    assert len(analyze(rated, tmp_path / "out").num_tokens) == 1
