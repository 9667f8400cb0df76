"""A source's schema is known from its first record, and each record is understood or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from chunkplan.errors import DataError
from chunkplan.intake.records import Conversation, Message, PromptRecord, TextRecord
from chunkplan.intake.schemas import detect_schema, parse_record


def _chat(*messages: Any, **others: Any) -> dict[str, Any]:
    return {"messages": list(messages), **others}


@pytest.mark.parametrize(
    ("record", "schema"),
    [
        ({"text": "a", "messages": []}, "messages"),
        ({"conversations": [], "id": 1}, "conversations"),
        ({"prompt": "a", "completion": "b", "text": "ab"}, "prompt+completion"),
        ({"prompt": "a", "text": "b"}, "text"),
    ],
)
def test_the_schema_that_says_most_is_detected(record: dict[str, Any], schema: str) -> None:
    assert detect_schema(record, "x:1") == schema


def test_an_unknown_schema_shows_the_keys_found_and_those_known() -> None:
    with pytest.raises(DataError) as caught:
        detect_schema({"question": "a", "answer": "b"}, "x:1")
    for word in ("`question`", "`answer`", "`messages`", "`prompt` and `completion`", "`text`"):
        assert word in caught.value.message


def test_preference_pairs_are_refused_by_name_even_after_the_first_record() -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError, match="preference pair"):
        detect_schema(pair, "x:1")
    with pytest.raises(DataError, match="preference pair"):
        parse_record("text", {"text": "t", **pair}, "x:2")


def test_plain_records() -> None:
    assert parse_record("text", {"text": "a", "id": 3}, "x:1") == TextRecord("a")
    assert parse_record("prompt+completion", {"prompt": "a", "completion": "b"}, "x:1") == PromptRecord("a", "b")


def test_messages_with_parts_tool_calls_and_tools() -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "value": "b"}]
    record = _chat(
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "c", "name": "f"},
        tools=[{"name": "f"}],
    )
    assert parse_record("messages", record, "x:7") == Conversation(
        (
            Message("user", "ab", False),
            Message("assistant", None, True, {"tool_calls": calls}),
            Message("tool", "c", False, {"name": "f"}),
        ),
        [{"name": "f"}],
        "x:7",
    )


@pytest.mark.parametrize(
    ("keys", "role", "counts"),
    [
        ({}, "assistant", True),
        ({}, "user", False),
        ({"loss": False}, "assistant", False),
        ({"loss": True}, "user", True),
        ({"loss_weight": 0}, "assistant", False),
        ({"weight": 1.0}, "user", True),
        ({"loss": None, "weight": None}, "assistant", True),
    ],
)
def test_a_message_counts_as_it_says_or_else_if_the_assistant_wrote_it(
    keys: dict[str, Any], role: str, counts: bool
) -> None:
    parsed = parse_record("messages", _chat({"role": role, "content": "a", **keys}), "x:1")
    assert isinstance(parsed, Conversation)
    assert parsed.messages == (Message(role, "a", counts),)


def test_sharegpt_speakers_become_roles() -> None:
    speakers = ["system", "human", "gpt", "function_call", "observation", "user", "assistant", "tool"]
    record = {"conversations": [{"from": speaker, "value": speaker} for speaker in speakers]}
    parsed = parse_record("conversations", record, "x:1")
    assert isinstance(parsed, Conversation)
    roles = ["system", "user", "assistant", "assistant", "tool", "user", "assistant", "tool"]
    assert [message.role for message in parsed.messages] == roles
    assert [message.content for message in parsed.messages] == speakers
    assert all(message.counts_in_loss == (message.role == "assistant") for message in parsed.messages)


@pytest.mark.parametrize(
    ("schema", "record", "message"),
    [
        ("text", {"txt": "a"}, "`text` missing, found the keys `txt`; the first record made this file text"),
        ("text", {"text": None}, "`text` is null, expected a string"),
        ("prompt+completion", {"prompt": "a", "completion": [1]}, "`completion` is a list, expected a string"),
        ("messages", {"messages": "a"}, "`messages` is a string, expected a list"),
        ("messages", _chat("a"), "`messages[0]` is a string, expected an object"),
        ("messages", _chat({"content": "a"}), "`messages[0].role` is missing"),
        ("messages", _chat({"role": "user", "content": 1}), "`messages[0].content` is a number, expected a string"),
        ("messages", _chat({"role": "assistant", "content": None}), "`messages[0].content` is null and there are no"),
        ("messages", _chat({"role": "user"}), "`messages[0].content` is missing and there are no `tool_calls`"),
        (
            "messages",
            _chat({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}),
            '`messages[0].content[0]` is a part of type "image_url"',
        ),
        ("messages", _chat({"role": "user", "content": "a", "loss": 1}), "`messages[0].loss` is a number"),
        ("messages", _chat({"role": "user", "content": "a", "loss_weight": 0.5}), "`messages[0].loss_weight` is 0.5"),
        ("messages", _chat({"role": "user", "content": "a", "weight": "1"}), "`messages[0].weight` is a string"),
        ("messages", _chat(tools="[]"), "`tools` is a string, expected a list"),
        ("conversations", {"conversations": [{"from": "bot", "value": "a"}]}, '`conversations[0].from` is "bot"'),
        ("conversations", {"conversations": [{"from": "gpt"}]}, "`conversations[0].value` is missing"),
    ],
)
def test_a_record_that_does_not_fit_says_which_key_and_what_was_found(
    schema: str, record: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        parse_record(schema, record, "x.jsonl:9")
    assert caught.value.where == "x.jsonl:9"
    assert message in caught.value.message


def test_what_has_nothing_to_train_on_is_empty() -> None:
    empty = _chat({"role": "user", "content": ""}, {"role": "assistant", "content": []})
    calls = _chat({"role": "assistant", "content": None, "tool_calls": [{}]})
    assert parse_record("text", {"text": ""}, "x:1").is_empty
    assert parse_record("prompt+completion", {"prompt": "", "completion": ""}, "x:1").is_empty
    assert parse_record("messages", _chat(), "x:1").is_empty
    assert parse_record("messages", empty, "x:1").is_empty
    assert not parse_record("messages", calls, "x:1").is_empty
    assert not parse_record("text", {"text": " "}, "x:1").is_empty
