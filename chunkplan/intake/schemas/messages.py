"""`messages`: a conversation as chat templates take it, each message with a `role` and a `content`."""

from __future__ import annotations

from typing import Any

from chunkplan.intake.records import Conversation
from chunkplan.intake.schemas.fields import field, tools
from chunkplan.intake.schemas.layout import Schema
from chunkplan.intake.schemas.message_list import make_conversation, parse_messages


def parse(record: dict[str, Any], columns: dict[str, str]) -> Conversation:
    """Raises RecordError where a message is not one that chat templates take, or all are blank."""
    key = columns["messages"]
    messages = parse_messages(field(record, key, list), key)
    return make_conversation(messages, tools(record, columns["tools"]), key)


SCHEMA = Schema({"messages": ("messages",)}, parse, {"tools": ("tools",)})
