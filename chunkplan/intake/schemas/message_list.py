"""Lists of messages: with `role` and `content`, with ShareGPT's `from` and `value`, or as `human` and `assistant`."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from chunkplan.intake.records import Conversation, JsonObject, Message
from chunkplan.intake.schemas.fields import empty, field, is_blank, json_type, typed, unsupported, wrong
from chunkplan.intake.schemas.refused import SUSPECT, refuse_media
from chunkplan.intake.schemas.roles import PROGRAM_ROLES, ROLES, role_of, with_system

#: Keys of a message that are meant for the training and not for a chat template.
_LOSS_KEYS = ("loss", "loss_weight", "weight", "train", "training")

#: What axolotl reads for parts of a message.
_LOSS_OF_PARTS = "train_detail"

_OWN_KEYS = {*_LOSS_KEYS, "role", "content"}
_TURN_KEYS = {*_LOSS_KEYS, "from", "value"}


def parse_messages(values: list[Any], path: str, *, is_sharegpt: bool = False) -> list[Message]:
    """The messages of a list found at `path`. `is_sharegpt` says what is expected of one that has neither layout.

    A ShareGPT call of a function stays text that the assistant writes, as the data has it. `tool_calls` are handed on
    to chat templates as they are, arguments that are a JSON string included: that is what transformers does.

    Raises:
        RecordError: a message is in neither layout, or is more than text.
    """
    messages = []
    for index, value in enumerate(values):
        if type(value) is dict:
            content, role = value.get("content"), value.get("role")
            if type(content) is str and len(value) == 2 and type(role) is str and role in ROLES:
                messages.append(Message(ROLES[role], content))  # what most messages are
                continue
            said, speaker = value.get("value"), value.get("from")
            if type(said) is str and len(value) == 2 and type(speaker) is str and speaker in ROLES:
                messages.append(Message(ROLES[speaker], said))
                continue
        value = typed(value, dict, f"{path}[{index}]")
        if _is_exchange(value):
            messages += [Message(role, text) for role, text in sorted(_by_role(value), reverse=True)]
        elif "role" in value or not ("from" in value or is_sharegpt):
            messages.append(_message(value, f"{path}[{index}]"))
        else:
            messages.append(_turn(value, f"{path}[{index}]"))
    return with_system(messages)


def _is_exchange(value: JsonObject) -> bool:
    """Whether it is what a user asked and the assistant answered, as swift has both in one object."""
    if len(value) != 2 or not all(type(text) is str for text in value.values()):
        return False
    return sorted(role for role, _ in _by_role(value)) == ["assistant", "user"]


def _by_role(value: JsonObject) -> list[tuple[str, Any]]:
    """(role, text) of an object whose keys may be names of roles."""
    return [(ROLES.get(key, key), text) for key, text in value.items()]


def make_conversation(messages: list[Message], tools: list[JsonObject] | None, path: str) -> Conversation:
    """A conversation of `messages`, found at `path`; raises RecordError where all of them are blank."""
    for message in messages:
        if not is_blank(message.content) or message.fields.get("tool_calls"):
            return Conversation(tuple(messages), tools)
    return empty(f"`{path}` has no messages" if not messages else f"the messages of `{path}` are all blank")


def unread_of_turn(turn: JsonObject) -> list[str]:
    """The keys of a message in ShareGPT's layout that say something which no chat template sees."""
    return [key for key, value in turn.items() if value is not None and key not in _TURN_KEYS]


def _message(message: JsonObject, path: str) -> Message:
    loss = _stated_loss(message, path)
    role = role_of(field(message, "role", str, path), f"{path}.role", says_if_it_counts=loss is not None)
    # Rows of a table have every key of every row: null says nothing.
    fields = {key: value for key, value in message.items() if value is not None and key not in _OWN_KEYS}
    if not SUSPECT.isdisjoint(fields):
        refuse_media(fields, path)
    if "function_call" in fields:
        _take_function_call(fields, path)
    content = message.get("content")
    parts: tuple[str, ...] = ()
    if isinstance(content, list):
        parts = _text_parts(content, fields, f"{path}.content")
        content = "".join(parts)
    elif content is None and not fields.get("tool_calls"):
        state = "null" if "content" in message else "missing"
        wrong(f"`{path}.content` is {state} and there are no `tool_calls`, expected a string")
    elif content is not None:
        content = field(message, "content", str, path)
    return Message(role, content, loss, fields, parts)


def _turn(message: JsonObject, path: str) -> Message:
    speaker = field(message, "from", str, path)
    loss = _stated_loss(message, path)
    role = role_of(speaker, f"{path}.from", says_if_it_counts=loss is not None)
    value = message.get("value")
    if isinstance(value, (list, dict)) and speaker.lower() in PROGRAM_ROLES:
        value = json.dumps(value, ensure_ascii=False)
    elif type(value) is not str:
        value = field(message, "value", str, path)
    return Message(role, value, loss)


def _stated_loss(message: JsonObject, path: str) -> bool | None:
    """Whether a message counts in the loss, as its `loss`, `weight` or the like says; None where they say nothing.

    Raises:
        RecordError: what they say is neither yes nor no, or they disagree.
    """
    if message.get(_LOSS_OF_PARTS):
        unsupported(f"`{path}.{_LOSS_OF_PARTS}` has parts of a message, which counts in the loss as a whole or not")
    stated: dict[str, bool] = {}
    for key in _LOSS_KEYS:
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)):
            wrong(f"`{path}.{key}` is {json_type(value)}, expected 0 or 1")
        if value not in (0, 1):
            unsupported(f"`{path}.{key}` is {value}, expected 0 or 1", hint="a token counts in the loss or not")
        stated[key] = bool(value)
    if len(set(stated.values())) > 1:
        wrong(
            f"`{path}` says with {' and '.join(f'`{key}`' for key in stated)} both that it counts and that it does not"
        )
    return next(iter(stated.values()), None)


def _text_parts(parts: list[Any], fields: JsonObject, path: str) -> tuple[str, ...]:
    """The texts of a list of parts; what an assistant thought and which tools it called goes into `fields`."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[JsonObject] = []
    for index, part in enumerate(parts):
        inside = f"{path}[{index}]"
        part = typed(part, dict, inside)
        kind = field(part, "type", str, inside)
        if kind not in ("text", "reasoning", "tool_call"):
            unsupported(f'`{inside}` is a part of type "{kind}": only text, reasoning and tool calls are planned')
        if kind == "tool_call":
            calls.append(_call(part.get("value"), f"{inside}.value"))
        else:
            (texts if kind == "text" else reasoning).append(
                field(part, "text" if "text" in part else "value", str, inside)
            )
    if reasoning:
        fields["reasoning_content"] = "".join(reasoning)
    if calls:
        fields["tool_calls"] = [*(fields.get("tool_calls") or []), *calls]
    return tuple(texts)


def _take_function_call(fields: JsonObject, path: str) -> None:
    """Put the `function_call` of a message, OpenAI's way to write a call before there were tools, into `tool_calls`."""
    value = fields.pop("function_call")
    if value in ({}, ""):
        return
    if fields.get("tool_calls"):
        wrong(f"`{path}` has both `function_call` and `tool_calls`", hint="leave one of the two out")
    fields["tool_calls"] = [_call(value, f"{path}.function_call")]


def _call(value: Any, path: str) -> JsonObject:
    """A call of a tool as chat templates expect it, from a JSON string or object with `name` and `arguments`."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            wrong(f"`{path}` is a string that is not JSON ({error})")
    if not isinstance(value, dict) or type(value.get("name")) is not str:
        wrong(f"`{path}` is {json_type(value)}, expected an object with `name` and `arguments`")
    return {"type": "function", "function": {"name": value["name"], "arguments": value.get("arguments", {})}}
