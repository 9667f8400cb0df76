"""`conversations`: the ShareGPT layout, each message with a `from` and a `value`."""

from __future__ import annotations

from typing import Any

from chunkplan.errors import DataError
from chunkplan.intake.records import Conversation, Message
from chunkplan.intake.schemas.fields import HINT, counts_in_loss, field, tools, typed

#: Who speaks, as ShareGPT names them -> as chat templates do.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}


def parse(record: dict[str, Any], where: str) -> Conversation:
    """Raises DataError where a message has an unknown speaker or is not text."""
    messages = field(record, "conversations", list, where)
    return Conversation(
        tuple(_message(message, where, f"conversations[{index}]") for index, message in enumerate(messages)),
        tools(record, where),
        where,
    )


def _message(message: Any, where: str, path: str) -> Message:
    message = typed(message, dict, where, path)
    speaker = field(message, "from", str, where, inside=path)
    if speaker not in _ROLES:
        raise DataError(f'`{path}.from` is "{speaker}", expected one of {", ".join(_ROLES)}', where=where, hint=HINT)
    role = _ROLES[speaker]
    return Message(role, field(message, "value", str, where, inside=path), counts_in_loss(message, role, where, path))
