"""`conversations`: the ShareGPT layout, messages with a `from` and a `value`; a `system` beside them comes first."""

from __future__ import annotations

from typing import Any

from chunkplan.intake.records import Conversation, Message
from chunkplan.intake.schemas.fields import field, optional_text, tools
from chunkplan.intake.schemas.layout import Schema
from chunkplan.intake.schemas.message_list import make_conversation, parse_messages


def parse(record: dict[str, Any], columns: dict[str, str]) -> Conversation:
    """Raises RecordError where a message has an unknown speaker or is not text, or all are blank."""
    key = columns["conversations"]
    messages = parse_messages(field(record, key, list), key, is_sharegpt=True)
    conversation = make_conversation(messages, tools(record, columns["tools"]), key)
    system = optional_text(record, columns["system"])
    if system is None:
        return conversation
    return Conversation((Message("system", system), *conversation.messages), conversation.tools)


SCHEMA = Schema({"conversations": ("conversations",)}, parse, {"system": ("system",), "tools": ("tools",)})
