"""Lists of messages, in the layouts that trainers take.

- `role` and `content`: OpenAI's, and that of chat templates;
- `from` and `value`: ShareGPT's;
- `role` and `value`: what axolotl calls pygmalion (axolotl-ai-cloud/axolotl, docs/dataset-formats/conversation.qmd);
- `role` and `parts`: Gemini's (cloud.google.com/vertex-ai/generative-ai/docs/models/gemini-supervised-tuning-prepare);
- a question and its answer in one object: `human` and `assistant` in swift's and Firefly's data (modelscope/ms-swift,
  docs/source_en/Customization/Custom-dataset.md), `input` and `output`, with a `system` in the first of them, in
  XTuner's (InternLM/xtuner, docs/en/user_guides/dataset_format.md).
"""

from __future__ import annotations

import json
from typing import Any

from chunkplan.intake.records import REASONING, Conversation, JsonObject, Message
from chunkplan.intake.schemas.calls import CALL_ROLES, call_of, calls_in_text, with_calls_read
from chunkplan.intake.schemas.fields import (
    empty,
    field,
    is_blank,
    objects,
    quoted,
    shortened,
    typed,
    unsupported,
    wrong,
)
from chunkplan.intake.schemas.key_kinds import READ_IN_MESSAGES, is_flag, refuse_in_message
from chunkplan.intake.schemas.loss_flags import FLAGS, stated_loss
from chunkplan.intake.schemas.refused import SUSPECT, refuse_media
from chunkplan.intake.schemas.roles import PROGRAM_ROLES, ROLES, role_of, with_system

_OWN_KEYS = {*FLAGS, "role", "content"}
_TURN_KEYS = {*FLAGS, "from", "value"}
_KNOWN = {*READ_IN_MESSAGES, *_OWN_KEYS, "parts", "value"}
_SAID = {*_TURN_KEYS, *REASONING}

#: What to do with messages that are no objects, such as texts by turns.
_AS_MESSAGES = 'write each message as {"role": "user", "content": TEXT}, those of the assistant with its role'

#: The roles of those who say what is in their messages, as most do.
_SPEAKERS = {name: role for name, role in ROLES.items() if name not in CALL_ROLES}

#: The roles of a question and its answer in one object, besides those of `ROLES`.
_EXCHANGE_ROLES = {"input": "user", "output": "assistant"}
_OF_EXCHANGE = dict.fromkeys(("system", "user", "assistant")).keys()


def parse_messages(values: list[Any], path: str, *, is_sharegpt: bool = False) -> list[Message]:
    """The messages of a list found at `path`. `is_sharegpt` says what is expected of one that has neither layout.

    A turn whose role says that it calls tools has its `calls` beside the text.

    Raises:
        RecordError: a message is in neither layout, or is more than text.
    """
    messages = []
    for index, value in enumerate(values):
        if type(value) is dict:
            content, role = value.get("content"), value.get("role")
            if type(content) is str and len(value) == 2 and type(role) is str and role in _SPEAKERS:
                messages.append(Message(_SPEAKERS[role], content))  # what most messages are
                continue
            said, speaker = value.get("value"), value.get("from")
            if type(said) is str and len(value) == 2 and type(speaker) is str and speaker in _SPEAKERS:
                messages.append(Message(_SPEAKERS[speaker], said))
                continue
        value = typed(value, dict, f"{path}[{index}]", _AS_MESSAGES)
        if "role" not in value and "from" not in value and (exchange := exchange_of(value)):
            loss = stated_loss(value, f"{path}[{index}]")
            roles = [role for role in _OF_EXCHANGE if role in exchange and (role != "system" or exchange[role].strip())]
            messages += [Message(role, exchange[role], loss if role == "assistant" else None) for role in roles]
            continue
        inside, name = f"{path}[{index}]", value.get("role", value.get("from"))
        is_call = type(name) is str and name.lower() in CALL_ROLES
        value = calls_in_text(value) if is_call else value
        read = _message if "role" in value or not ("from" in value or is_sharegpt) else _turn
        message = read(value, inside)
        messages.append(with_calls_read(message, inside) if is_call else message)
    return with_system(messages)


def exchange_of(value: JsonObject) -> dict[str, str] | None:
    """Role -> text of what a user asked and the assistant answered, perhaps behind a system text, in one object.

    Flags beside them are those of the answer.
    """
    said = (key for key, text in value.items() if text is not None and key not in FLAGS)
    roles = {key: _EXCHANGE_ROLES.get(key) or ROLES.get(key, key) for key in said}
    by_role = {role: value[key] for key, role in roles.items()}
    is_one = by_role.keys() | {"system"} == _OF_EXCHANGE and len(by_role) == len(roles)
    return by_role if is_one and all(type(text) is str for text in by_role.values()) else None


def make_conversation(messages: list[Message], tools: list[JsonObject] | None, path: str) -> Conversation:
    """A conversation of `messages`, found at `path`; raises RecordError where all of them are blank."""
    for message in messages:
        if not is_blank(message.content) or message.fields.get("tool_calls"):
            return Conversation(tuple(messages), tools)
    return empty(f"`{path}` has no messages" if not messages else f"the messages of `{path}` are all blank")


def unread_of_turn(turn: JsonObject) -> list[str]:
    """The keys of a message that say something which chat templates do not know."""
    if exchange_of(turn):
        return []
    return [
        key for key, value in turn.items() if value is not None and key not in (_KNOWN if "role" in turn else _SAID)
    ]


def _message(message: JsonObject, path: str) -> Message:
    loss = stated_loss(message, path)
    role = role_of(field(message, "role", str, path), f"{path}.role", says_if_it_counts=loss is not None)
    message = _with_content(message, path)
    # Rows of a table have every key of every row: null says nothing, and neither do no calls.
    fields = {key: value for key, value in message.items() if value is not None and key not in _OWN_KEYS}
    if calls := objects(fields.pop("tool_calls", None), f"{path}.tool_calls", or_one=True):
        fields["tool_calls"] = calls
    if fields:
        refuse_in_message(fields, path)
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
        others = [key for key, value in message.items() if value is not None]
        found = f"found the keys {quoted(others)}"
        wrong(f"`{path}.content` is {state} and there are no `tool_calls`, expected a string; {found}")
    elif content is not None:
        content = field(message, "content", str, path)
    return Message(role, content, loss, fields, parts)


def _with_content(message: JsonObject, path: str) -> JsonObject:
    """`message` with its `content`, where that has another name: `value` as in pygmalion, or `parts` as in Gemini's."""
    if message.get("content") is not None:
        return message
    value, parts = message.get("value"), message.get("parts")
    if type(value) is str:
        return {**message, "content": value, "value": None}
    if type(parts) is list:
        content = [_part(part, f"{path}.parts[{index}]") for index, part in enumerate(parts)]
        return {**message, "content": content, "parts": None}
    return message


def _part(part: Any, path: str) -> JsonObject:
    """A part of a message of Gemini as OpenAI has parts; a `thought` is what was thought before the answer."""
    others = [key for key, value in typed(part, dict, path).items() if key not in ("text", "thought") and value]
    if others:
        unsupported(f"`{path}` has `{shortened(others[0])}`: only text is planned")
    return {"type": "reasoning" if part.get("thought") else "text", "text": field(part, "text", str, path)}


def _turn(message: JsonObject, path: str) -> Message:
    speaker = field(message, "from", str, path)
    loss = stated_loss(message, path)
    role = role_of(speaker, f"{path}.from", says_if_it_counts=loss is not None)
    value = message.get("value")
    if isinstance(value, (list, dict)) and speaker.lower() in PROGRAM_ROLES:
        value = json.dumps(value, ensure_ascii=False)
    elif type(value) is not str:
        value = field(message, "value", str, path)
    others = {key: inner for key, inner in message.items() if inner is not None and key not in _TURN_KEYS}
    refuse_in_message(others, path)
    return Message(role, value, loss, {key: others[key] for key in REASONING if others.get(key)})


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
        if flags := [key for key, one in part.items() if key not in ("text", "value") and is_flag(key, one)]:
            unsupported(
                f"`{inside}.{flags[0]}` may say what counts in the loss, and a message counts as a whole or not",
                hint="say of the message whether it counts; remove the key if it means another thing",
            )
        if kind == "tool_call":
            calls.append(call_of(part.get("value"), f"{inside}.value"))
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
    fields["tool_calls"] = [call_of(value, f"{path}.function_call")]
