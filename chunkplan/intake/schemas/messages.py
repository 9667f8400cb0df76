"""`messages`: a conversation as chat templates take it, each message with a `role` and a `content`."""

from __future__ import annotations

from typing import Any

from chunkplan.errors import DataError
from chunkplan.intake.records import Conversation, Message
from chunkplan.intake.schemas.fields import HINT, LOSS_KEYS, counts_in_loss, field, tools, typed


def parse(record: dict[str, Any], where: str) -> Conversation:
    """Raises DataError where a message is not one that chat templates take, or is not text."""
    messages = field(record, "messages", list, where)
    return Conversation(
        tuple(_message(message, where, f"messages[{index}]") for index, message in enumerate(messages)),
        tools(record, where),
        where,
    )


def _message(message: Any, where: str, path: str) -> Message:
    message = typed(message, dict, where, path)
    role = field(message, "role", str, where, inside=path)
    return Message(
        role,
        _content(message, where, path),
        counts_in_loss(message, role, where, path),
        {key: value for key, value in message.items() if key not in ("role", "content", *LOSS_KEYS)},
    )


def _content(message: dict[str, Any], where: str, path: str) -> str | None:
    content = message.get("content")
    if content is None:
        if message.get("tool_calls"):
            return None
        state = "null" if "content" in message else "missing"
        raise DataError(
            f"`{path}.content` is {state} and there are no `tool_calls`, expected a string", where=where, hint=HINT
        )
    if isinstance(content, list):
        return "".join(_part(part, where, f"{path}.content[{index}]") for index, part in enumerate(content))
    return field(message, "content", str, where, inside=path)


def _part(part: Any, where: str, path: str) -> str:
    part = typed(part, dict, where, path)
    kind = field(part, "type", str, where, inside=path)
    if kind != "text":
        raise DataError(
            f'`{path}` is a part of type "{kind}", expected "text": only text is planned', where=where, hint=HINT
        )
    return field(part, "text" if "text" in part else "value", str, where, inside=path)
