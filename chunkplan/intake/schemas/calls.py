"""Calls of tools in data that are no `tool_calls`: turns of `function_call`, and OpenAI's way before there were tools.

A turn whose role says that it calls tools has JSON for its text: one call or a list of them, perhaps behind a thought
that ends with `</think>`, as LLaMA-Factory (hiyouga/LLaMA-Factory, data/README.md) and swift (modelscope/ms-swift,
docs/source_en/Instruction/Agent-support.md) read it.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from chunkplan.intake.records import JsonObject, Message
from chunkplan.intake.schemas.fields import json_type, wrong

#: Roles whose text is calls of tools.
CALL_ROLES = ("function_call", "tool_call")

_THOUGHT_END = "</think>"


def calls_in_text(turn: JsonObject) -> JsonObject:
    """A turn that calls tools with its calls as JSON, where they are values."""
    said = turn.get("content")
    is_parts = isinstance(said, list) and any(isinstance(part, dict) and "type" in part for part in said)
    return {**turn, "content": json.dumps(said)} if isinstance(said, (dict, list)) and not is_parts else turn


def with_calls_read(message: Message, path: str) -> Message:
    """The message, found at `path`, whose text is calls of tools, with these.

    Raises:
        RecordError: it is no JSON, or other JSON.
    """
    said = (message.content or "").strip()
    text = said if said[:1] in ("{", "[") else said.rpartition(_THOUGHT_END)[2]
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        wrong(
            f"`{path}` calls a tool and is no JSON ({error}), expected `name` and `arguments`, or a list of them",
            hint="fix this record, or name its role `assistant` if the model is to write that text as it is",
        )
    values = value if isinstance(value, list) else [value]
    if not values:
        wrong(f"`{path}` calls a tool and is an empty list, expected objects with `name` and `arguments`")
    return message._replace(calls=(said.removesuffix(text), [call_of(one, path) for one in values]))


def call_of(value: Any, path: str) -> JsonObject:
    """A call of a tool as chat templates expect it, from a JSON string or object with `name` and `arguments`.

    Swift's may have `parameters` in their place, and any may be in a `function`, as OpenAI has them.
    """
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            wrong(f"`{path}` is a string that is not JSON ({error})")
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or type(function.get("name")) is not str:
        wrong(f"`{path}` is {json_type(value)}, expected an object with `name` and `arguments`")
    arguments = function.get("arguments", function.get("parameters", {}))
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
