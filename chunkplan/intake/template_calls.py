"""How a chat template takes calls of tools: found out by rendering one.

Data have the arguments of a call as an object, or as JSON, which is OpenAI's form. Most templates write an object as
JSON themselves, and would quote JSON once more; some put JSON out as it is, and raise at an object or print it as
Python does. A template without a place for calls leaves them out.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from chunkplan.intake.records import JsonObject, Message, as_tools
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.template_shapes import TEXTS

#: Renders messages with tools. Raises RecordError where the template raises.
Render = Callable[[list[JsonObject], list[JsonObject] | None], str]

_NAME, _KEY, _VALUE = "qzname", "qzfirst", "qzsecond"
_OBJECT = {_KEY: _VALUE}
_JSON = json.dumps(_OBJECT)


def takes_calls(render: Render) -> str | None:
    """In which form a template puts out arguments of calls: as an "object", or else as "json"; None: it has no calls.

    As a text it takes JSON that stands in the rendering as it is.
    """
    tool = {"type": "function", "function": {"name": _NAME, "description": "d", "parameters": {"type": "object"}}}
    variants = list(itertools.product(("", "a"), (None, [tool])))
    if any(_VALUE in text and _KEY in text and f"'{_KEY}'" not in text for text in _texts(render, _OBJECT, variants)):
        return "object"
    if any(_JSON in text and f"'{_JSON}'" not in text for text in _texts(render, _JSON, variants)):
        return "json"
    return None


def _texts(render: Render, arguments: Any, variants: list[tuple[str, list[JsonObject] | None]]) -> Iterator[str]:
    """The renderings of a call with these arguments, where it is put out."""
    function = {"name": _NAME, "arguments": arguments}
    for content, tools in variants:
        calls = [{"id": "call00001", "type": "function", "function": function}]
        called = {"role": "assistant", "content": content, "tool_calls": calls}
        try:
            text = render([{"role": "user", "content": "a"}, called], tools)
        except RecordError:
            continue
        if _NAME in text:
            yield text


def with_calls(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Messages whose calls were text in the data, as chat templates take them: in `tool_calls`.

    Those with no text or thought of their own go on in the assistant's message before them, if both count in the loss
    or neither.
    """
    found: list[Message] = []
    for message in messages:
        if message.calls is not None:
            said, calls = message.calls
            begins = said or any(message.fields.get(key) for key in TEXTS)
            before = found[-1] if found and not begins else None
            if before is None or before.role != "assistant" or before.counts_in_loss != message.counts_in_loss:
                before = message._replace(content=said, parts=(), calls=None)
            else:
                found.pop()
            called = [*(before.fields.get("tool_calls") or ()), *calls]
            message = before._replace(fields={**message.fields, **before.fields, "tool_calls": called})
        found.append(message)
    return tuple(found)


def calls_put_out(
    render: Callable[[list[JsonObject]], str], messages: list[JsonObject]
) -> frozenset[tuple[int, int]] | None:
    """The calls of tools in what `render` makes of messages, by message and place in it.

    Each is seen by a name of its own for the tool. None where there are no calls, or the template raises at such names.
    """
    words: dict[str, tuple[int, int]] = {}
    others = []
    for index, message in enumerate(messages):
        calls = message.get("tool_calls")
        named = []
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            word = f"qz{index}in{place}zq"
            if isinstance(function, dict):
                call = {**call, "function": {**function, "name": word}}
            elif isinstance(call, dict):
                call = {**call, "name": word}
            words[word] = index, place
            named.append(call)
        others.append({**message, "tool_calls": named} if named else message)
    if not words:
        return None
    try:
        text = render(others)
    except RecordError:
        return None
    return frozenset(place for word, place in words.items() if word in text)


def forms_of(
    messages: list[JsonObject], tools: list[JsonObject] | None, takes: str | None
) -> Iterator[tuple[list[JsonObject], list[JsonObject] | None]]:
    """Messages and tools in the forms that templates take, of which `takes` says the first; others where they raise.

    Arguments of calls are objects, or JSON; a text that is no JSON stays one. Some templates take the `function` of a
    tool, where data have the function alone.
    """
    changes = [_as_json, _as_object] if takes == "json" else [_as_object, _as_json]
    has_calls = any("tool_calls" in message for message in messages)
    whole = as_tools(tools or [])
    for others in (tools, whole) if whole != (tools or []) else (tools,):
        for change in changes if has_calls else ():
            yield [_with_arguments(message, change) for message in messages], others
        if not has_calls:
            yield messages, others


def _with_arguments(message: JsonObject, change: Callable[[Any], Any]) -> JsonObject:
    """The message with the arguments of its calls as `change` makes them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            function = {**function, "arguments": change(function["arguments"])}
            call = {**call, "function": function} if "function" in call else function
        changed.append(call)
    return {**message, "tool_calls": changed}


def _as_object(arguments: Any) -> Any:
    """What JSON says, which may be quoted more than once; nothing but spaces says no arguments."""
    value = arguments
    while isinstance(value, str):
        if not value.strip():
            return {}
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError):
            return arguments
    return value


def _as_json(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, (dict, list)) else arguments
