"""Each record of a schema is understood, or refused with its reason and the user's own key."""

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
    Record,
    TextRecord,
    TokensRecord,
)
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.schemas import SCHEMAS, Layout, parse


def _parse(schema: str, record: dict[str, Any], **columns: str) -> Record:
    usual = {role: keys[0] for role, keys in SCHEMAS[schema].roles.items()}
    return parse(Layout(schema, usual | columns, ""), record)


def _chat(*messages: Any, **others: Any) -> dict[str, Any]:
    return {"messages": list(messages), **others}


def _messages(schema: str, record: dict[str, Any]) -> tuple[Message, ...]:
    parsed = _parse(schema, record)
    assert isinstance(parsed, Conversation)
    return parsed.messages


def test_plain_records_under_their_own_or_other_keys() -> None:
    assert _parse("text", {"text": "a", "id": 3}) == TextRecord("a")
    assert _parse("text", {"body": "a"}, text="body") == TextRecord("a")
    assert _parse("prompt+completion", {"prompt": "a", "completion": "b"}) == PromptRecord("a", "b")
    assert _parse("prompt+completion", {"prompt": "", "completion": "b"}) == PromptRecord("", "b")
    assert _parse("length", {"n": 7}, length="n") == LengthRecord(7)


def test_messages_with_parts_tool_calls_and_tools() -> None:
    calls = [{"function": {"name": "f", "arguments": '{"x": 1}'}}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "value": "b"}]
    record = _chat(
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "c", "name": "f", "tool_calls": None},
        tools=[{"name": "f"}],
    )
    assert _parse("messages", record) == Conversation(
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
    assert _messages("messages", _chat({"role": "assistant", "content": parts})) == (
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
    parsed = _parse(schema, {schema: [{"role": "user", "content": "a"}], "tools": tools})
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
    [message] = _messages("messages", _chat({"role": role, "content": "a", **keys}))
    assert message == Message(role, "a", loss)
    assert message.counts_in_loss == counts


def test_sharegpt_speakers_become_roles() -> None:
    speakers = ["system", "human", "gpt", "function_call", "observation", "user", "assistant", "tool", "chatgpt"]
    messages = _messages("conversations", {"conversations": [{"from": name, "value": name} for name in speakers]})
    roles = ["system", "user", "assistant", "assistant", "tool", "user", "assistant", "tool", "assistant"]
    assert [message.role for message in messages] == roles
    assert [message.content for message in messages] == speakers
    assert all(message.counts_in_loss == (message.role == "assistant") for message in messages)


def test_sharegpt_may_begin_with_gpt_and_have_a_system_text_weights_and_calls_as_values() -> None:
    record = {
        "conversations": [
            {"from": "gpt", "value": "hi", "weight": 0},
            {"from": "function_call", "value": [{"name": "f", "arguments": {"ü": 1}}]},
            {"from": "observation", "value": {"a": 1}},
        ],
        "system": "Be kind.",
    }
    assert _messages("conversations", record) == (
        Message("system", "Be kind."),
        Message("assistant", "hi", False),
        Message("assistant", '[{"name": "f", "arguments": {"ü": 1}}]'),
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
    assert _parse("instruction", record) == Exchange("Be brief.", "Add.\n1 2", "3")
    for nothing in (None, "", "  "):
        record = {"instruction": "Add.", "input": nothing, "response": "3", "system": nothing}
        assert _parse("instruction", record, output="response") == Exchange(None, "Add.", "3")
    assert _parse("instruction", {"instruction": "", "input": "1 2", "output": "3"}) == Exchange(None, "1 2", "3")
    exchange = _parse("question+answer", {"question": "1+1?", "answer": "2"})
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
    parsed = _parse("input_ids", record)
    assert isinstance(parsed, TokensRecord)
    assert (parsed.input_ids.dtype, parsed.target.dtype) == (np.int32, np.bool_)
    assert parsed.input_ids.tolist() == input_ids
    assert parsed.target.astype(int).tolist() == target


def _user(content: Any, **others: Any) -> dict[str, Any]:
    return _chat({"role": "user", "content": content, **others})


@pytest.mark.parametrize(
    ("schema", "record", "message"),
    [
        ("text", {"txt": "a"}, "`text` is missing, expected a string, found the keys `txt`"),
        ("text", {"text": None}, "`text` is null, expected a string"),
        ("prompt+completion", {"prompt": "a", "completion": 1}, "`completion` is a number, expected a string"),
        ("prompt+completion", {"prompt": "a", "completion": [1]}, "expected two strings or two lists of messages"),
        ("prompt+completion", {"prompt": [{}], "completion": [{}]}, "`prompt[0].role` is missing"),
        ("messages", {"messages": "a"}, "`messages` is a string, expected a list"),
        ("messages", _chat("a"), "`messages[0]` is a string, expected an object"),
        ("messages", _chat({"content": "a"}), "`messages[0].role` is missing"),
        ("messages", _user(1), "`messages[0].content` is a number, expected a string"),
        ("messages", _chat({"role": "assistant", "content": None}), "`messages[0].content` is null and there are no"),
        ("messages", _chat({"role": "user"}), "`messages[0].content` is missing and there are no `tool_calls`"),
        (
            "messages",
            _user([{"type": "tool_call", "value": "{"}]),
            "`messages[0].content[0].value` is a string that is",
        ),
        ("messages", _user([{"type": "tool_call", "value": [1]}]), "expected an object with `name` and `arguments`"),
        ("messages", _user([{"text": "a"}]), "`messages[0].content[0].type` is missing"),
        ("messages", _user("a", weight="1"), "`messages[0].weight` is a string"),
        ("messages", _user("a", loss=False, weight=1), "`loss` and `weight` both that it counts and that it does not"),
        ("messages", _chat({"role": "user", "content": "a"}, tools={}), "`tools` is an object, expected a list"),
        ("messages", _chat({"role": "user", "content": "a"}, tools="{}"), "an object written as JSON, expected a list"),
        (
            "messages",
            _chat({"role": "user", "content": "a"}, tools=[{}, "{}"]),
            "`tools[1]` is a string, expected an object",
        ),
        ("messages", _chat({"role": "user", "content": "a"}, tools="x"), "`tools` is a string that is not JSON"),
        ("conversations", {"conversations": [{"from": "bot", "value": "a"}]}, '`conversations[0].from` is "bot"'),
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
        ("input_ids", {"input_ids": [1, 2], "attention_mask": [1, 2]}, "`attention_mask[1]` is 2, expected 0 or 1"),
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
        _parse(schema, record)
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
            "instruction",
            {"instruction": "a", "output": "b", "history": [["c", "d"]]},
            "`history` has earlier exchanges",
        ),
    ],
)
def test_what_is_not_planned_is_refused_by_name(schema: str, record: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        _parse(schema, record)
    assert caught.value.reason == "unsupported"
    assert message in caught.value.message


def test_empty_keys_of_what_is_not_planned_say_nothing() -> None:
    record = {"text": "t", "chosen": None, "rejected": None, "images": [], "video": None, "audio": ""}
    assert _parse("text", record) == TextRecord("t")


@pytest.mark.parametrize(
    ("schema", "record"),
    [
        ("text", {"text": ""}),
        ("text", {"text": " \n\u2003"}),
        ("prompt+completion", {"prompt": "", "completion": " "}),
        ("prompt+completion", {"prompt": [], "completion": []}),
        ("messages", _chat()),
        ("messages", _chat({"role": "user", "content": ""}, {"role": "assistant", "content": []})),
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
        _parse(schema, record)
    assert caught.value.reason == "empty"


def test_a_call_of_a_tool_is_something_to_train_on() -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    assert len(_messages("messages", _chat({"role": "assistant", "content": None, "tool_calls": calls}))) == 1


def test_records_of_one_source_may_name_a_role_differently() -> None:
    """Unless the user has said what its key is."""
    one = _parse("instruction", {"instruction": "a", "output": "b"})
    assert _parse("instruction", {"instruction": "a", "response": "b"}) == one
    assert _parse("instruction", {"instruction": "a", "response": "b", "output": None}, output="output") == one
    assert _parse("length", {"num_tokens": 5}, length="length") == _parse("length", {"length": 5})
    with pytest.raises(RecordError, match="`said` is missing"):
        _parse("instruction", {"instruction": "a", "response": "b"}, output="said")


def test_what_dolly_calls_context_is_part_of_the_prompt() -> None:
    record = {"instruction": "a", "context": "c", "response": "b", "category": "qa"}
    assert _parse("instruction", record) == _parse("instruction", {"instruction": "a", "input": "c", "output": "b"})


def test_media_in_a_message_are_refused_by_name() -> None:
    with pytest.raises(RecordError, match=r"`messages\[0\]\.images`") as caught:
        _parse("messages", _chat({"role": "user", "content": "x", "images": ["a.png"]}))
    assert caught.value.reason == "unsupported"


def test_a_call_nested_too_deeply_to_be_written_is_rejected() -> None:
    value: Any = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(RecordError) as caught:
        _parse("conversations", {"conversations": [{"from": "function_call", "value": value}]})
    assert caught.value.reason == "too-deep"
