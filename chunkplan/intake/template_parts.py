"""The forms of content, of arguments and of tools that a chat template takes.

transformers hands lists of text parts on as they are. Many templates know strings alone: they would print the list as
Python writes it, leave it out, or raise. Whether one reads them is found out by rendering one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from chunkplan.intake.records import JsonObject, as_tools
from chunkplan.intake.rejection import RecordError

_WORDS = ("qzfirst", "qzsecond")
_USER: JsonObject = {"role": "user", "content": "a"}
_CALL: JsonObject = {
    "role": "assistant",
    "content": "a",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}


def reads_parts(render: Callable[[list[JsonObject]], str], role: str, num_parts: int) -> bool:
    """Whether what `render` makes of messages has the text of `num_parts` parts, one or two, of a message of `role`.

    Parts that are printed as Python or JSON writes them are not read.
    """
    words = _WORDS[:num_parts]
    message: JsonObject = {"role": role, "content": [{"type": "text", "text": word} for word in words]}
    match role:
        case "user":
            messages = [message]
        case "system" | "developer":  # as they begin a conversation
            messages = [message, _USER]
        case "tool":
            messages = [_USER, _CALL, message]
        case _:
            messages = [_USER, message]
    try:
        text = render(messages)
    except RecordError:
        return False
    return all(word in text and f"'{word}'" not in text and f'"{word}"' not in text for word in words)


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


def other_forms(
    messages: list[JsonObject], tools: list[JsonObject] | None
) -> Iterator[tuple[list[JsonObject], list[JsonObject] | None]]:
    """The same messages and tools as templates take them that raise at these, those closest to them first.

    Some templates put a string of arguments into the text and raise at an object, some walk over an object and raise at
    a string. Some take the `function` of a tool, where data have the function alone.
    """
    other = _with_other_arguments(messages)
    whole = as_tools(tools or [])
    if other is not None:
        yield other, tools
    if whole != (tools or []):
        yield messages, whole
        if other is not None:
            yield other, whole


def _with_other_arguments(messages: list[JsonObject]) -> list[JsonObject] | None:
    """Messages whose calls have their arguments in the other form: objects as JSON, and JSON as objects.

    None where there are no such arguments.
    """
    changed = False
    others = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and "arguments" in function:
                arguments = _other_form(function["arguments"])
                changed = changed or arguments is not function["arguments"]
                call = {**call, "function": {**function, "arguments": arguments}}
            calls.append(call)
        others.append({**message, "tool_calls": calls} if calls else message)
    return others if changed else None


def _other_form(arguments: Any) -> Any:
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, str):
        try:
            value = msgspec.json.decode(arguments)
        except (ValueError, RecursionError):
            return arguments
        return value if isinstance(value, dict) else arguments
    return arguments
