"""What becomes of the records of each schema."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chunkplan.intake.records import (
    Conversation,
    Exchange,
    LengthRecord,
    Message,
    PromptRecord,
    RecordError,
    TextRecord,
    TokensRecord,
)
from tests.support.intake_checks import chat, parse_as


def _messages(schema: str, record: dict[str, Any]) -> tuple[Message, ...]:
    parsed = parse_as(schema, record)
    assert isinstance(parsed, Conversation)
    return parsed.messages


def test_plain_records_under_their_own_or_other_keys() -> None:
    assert parse_as("text", {"text": "a", "id": 3}) == TextRecord("a")
    assert parse_as("text", {"body": "a"}, text="body") == TextRecord("a")
    assert parse_as("prompt+completion", {"prompt": "a", "completion": "b"}) == PromptRecord("a", "b")
    assert parse_as("prompt+completion", {"prompt": "", "completion": "b"}) == PromptRecord("", "b")
    assert parse_as("length", {"n": 7}, length="n") == LengthRecord(7)


def test_messages_with_parts_tool_calls_and_tools() -> None:
    calls = [{"function": {"name": "f", "arguments": '{"x": 1}'}}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "value": "b"}]
    record = chat(
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "c", "name": "f", "tool_calls": None},
        tools=[{"name": "f"}],
    )
    assert parse_as("messages", record) == Conversation(
        (
            Message("user", "ab", parts=("a", "b")),
            Message("assistant", None, None, {"tool_calls": calls}),
            Message("assistant", None, None, {"tool_calls": calls}),
            Message("tool", "c", None, {"name": "f"}),
        ),
        [{"name": "f"}],
    )


def test_parts_of_reasoning_and_tool_calls_go_where_chat_templates_look_for_them() -> None:
    parts = [
        {"type": "reasoning", "value": "hm"},
        {"type": "text", "value": "I look."},
        {"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"type": "tool_call", "value": {"name": "g"}},
    ]
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
    assert _messages("messages", chat({"role": "assistant", "content": parts})) == (
        Message(
            "assistant",
            "I look.",
            None,
            {"reasoning_content": "hm", "tool_calls": [{"type": "function", "function": call} for call in calls]},
            ("I look.",),
        ),
    )


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        (None, None),
        ([], None),
        ("", None),
        (" ", None),
        ("[]", None),
        ([{"name": "f"}], [{"name": "f"}]),
        ('[{"name": "f"}]', [{"name": "f"}]),
    ],
)
@pytest.mark.parametrize("schema", ["messages", "conversations"])
def test_tools_are_a_list_or_one_written_as_json(schema: str, tools: Any, expected: Any) -> None:
    parsed = parse_as(schema, {schema: [{"role": "user", "content": "a"}], "tools": tools})
    assert isinstance(parsed, Conversation)
    assert parsed.tools == expected


@pytest.mark.parametrize(
    ("keys", "role", "loss", "counts"),
    [
        ({}, "assistant", None, True),
        ({}, "user", None, False),
        ({"loss": False}, "assistant", False, False),
        ({"loss": True}, "user", True, True),
        ({"loss": 0}, "assistant", False, False),
        ({"loss_weight": 0}, "assistant", False, False),
        ({"loss_weight": 1.0, "weight": 1}, "user", True, True),
        ({"weight": 1.0}, "user", True, True),
        ({"loss": None, "weight": None}, "assistant", None, True),
    ],
)
def test_a_message_counts_as_it_says_or_else_if_the_assistant_wrote_it(
    keys: dict[str, Any], role: str, loss: bool | None, counts: bool
) -> None:
    [message] = _messages("messages", chat({"role": role, "content": "a", **keys}))
    assert message == Message(role, "a", loss)
    assert message.counts_in_loss == counts


def test_sharegpt_speakers_become_roles() -> None:
    speakers = ["system", "human", "gpt", "observation", "user", "assistant", "tool", "chatgpt"]
    messages = _messages("conversations", {"conversations": [{"from": name, "value": name} for name in speakers]})
    roles = ["system", "user", "assistant", "tool", "user", "assistant", "tool", "assistant"]
    assert [message.role for message in messages] == roles
    assert [message.content for message in messages] == speakers
    assert all(message.counts_in_loss == (message.role == "assistant") for message in messages)


def test_sharegpt_may_begin_with_gpt_and_have_a_system_text_weights_and_calls_as_values() -> None:
    call = {"name": "f", "arguments": {"ü": 1}}
    record = {
        "conversations": [
            {"from": "gpt", "value": "hi", "weight": 0},
            {"from": "function_call", "value": [call]},
            {"from": "observation", "value": {"a": 1}},
        ],
        "system": "Be kind.",
    }
    assert _messages("conversations", record) == (
        Message("system", "Be kind."),
        Message("assistant", "hi", False),
        Message(
            "assistant", '[{"name": "f", "arguments": {"ü": 1}}]', calls=("", [{"type": "function", "function": call}])
        ),
        Message("tool", '{"a": 1}'),
    )
    blank = _messages("conversations", {**record, "system": " "})
    assert blank[0] == Message("assistant", "hi", False)


def test_either_key_takes_either_layout_of_messages() -> None:
    layouts = [{"role": "user", "content": "a"}, {"from": "human", "value": "a"}]
    for schema in ("messages", "conversations"):
        for layout in layouts:
            assert _messages(schema, {schema: [layout]}) == (Message("user", "a"),)


def test_of_prompt_and_completion_as_messages_only_the_completion_counts() -> None:
    record = {
        "prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "loss": True}],
        "completion": [{"role": "assistant", "content": "c"}],
    }
    messages = _messages("prompt+completion", record)
    assert [message.content for message in messages] == ["a", "b", "c"]
    assert [message.counts_in_loss for message in messages] == [False, False, True]


def test_instructions_and_questions_are_exchanges() -> None:
    record = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief.", "history": []}
    assert parse_as("instruction", record) == Exchange("Be brief.", "Add.\n1 2", "3")
    for nothing in (None, "", "  "):
        record = {"instruction": "Add.", "input": nothing, "response": "3", "system": nothing}
        assert parse_as("instruction", record, output="response") == Exchange(None, "Add.", "3")
    assert parse_as("instruction", {"instruction": "", "input": "1 2", "output": "3"}) == Exchange(None, "1 2", "3")
    exchange = parse_as("question+answer", {"question": "1+1?", "answer": "2"})
    assert exchange == Exchange(None, "1+1?", "2")
    assert exchange.conversation == Conversation((Message("user", "1+1?"), Message("assistant", "2")))
    assert exchange.plain == PromptRecord("1+1?\n", "2")


@pytest.mark.parametrize(
    ("record", "input_ids", "target"),
    [
        ({"input_ids": [5, 0, 7]}, [5, 0, 7], [0, 1, 1]),
        ({"input_ids": [5, 6, 7], "labels": [5, -100, 7]}, [5, 6, 7], [0, 0, 1]),
        ({"input_ids": [5, 6, 7], "labels": [-100] * 3}, [5, 6, 7], [0, 0, 0]),
        ({"input_ids": [5, 6, 7, 9, 9], "attention_mask": [1, 1, 1, 0, 0]}, [5, 6, 7], [0, 1, 1]),
        (
            {"input_ids": [9, 5, 6, 7], "attention_mask": [0, 1, 1, 1], "labels": [-100, 5, 6, -100]},
            [5, 6, 7],
            [0, 1, 0],
        ),
        ({"input_ids": [2**31 - 1], "labels": None, "attention_mask": None}, [2**31 - 1], [0]),
    ],
)
def test_tokens_with_labels_and_padding(record: dict[str, Any], input_ids: list[int], target: list[int]) -> None:
    parsed = parse_as("input_ids", record)
    assert isinstance(parsed, TokensRecord)
    assert (parsed.input_ids.dtype, parsed.target.dtype) == (np.int32, np.bool_)
    assert parsed.input_ids.tolist() == input_ids
    assert parsed.target.astype(int).tolist() == target


def test_empty_keys_of_what_is_not_planned_say_nothing() -> None:
    record = {"text": "t", "chosen": None, "rejected": None, "images": [], "video": None, "audio": ""}
    assert parse_as("text", record) == TextRecord("t")


def test_a_call_of_a_tool_is_something_to_train_on() -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    assert len(_messages("messages", chat({"role": "assistant", "content": None, "tool_calls": calls}))) == 1


def test_records_of_one_source_may_name_a_role_differently() -> None:
    """Unless the user has said what its key is."""
    one = parse_as("instruction", {"instruction": "a", "output": "b"})
    assert parse_as("instruction", {"instruction": "a", "response": "b"}) == one
    assert parse_as("instruction", {"instruction": "a", "response": "b", "output": None}, output="output") == one
    assert parse_as("length", {"num_tokens": 5}, length="length") == parse_as("length", {"length": 5})
    with pytest.raises(RecordError, match="`said` is missing"):
        parse_as("instruction", {"instruction": "a", "response": "b"}, output="said")


def test_what_dolly_calls_context_is_part_of_the_prompt() -> None:
    record = {"instruction": "a", "context": "c", "response": "b", "category": "qa"}
    assert parse_as("instruction", record) == parse_as("instruction", {"instruction": "a", "input": "c", "output": "b"})
