"""`messages`: a conversation as chat templates take it, each message with a `role` and a `content`."""

from __future__ import annotations

from typing import Any

from chunkplan.intake.records import Conversation
from chunkplan.intake.schemas.beside import BESIDE, begin_with_system
from chunkplan.intake.schemas.fields import field, tools
from chunkplan.intake.schemas.layout import Schema
from chunkplan.intake.schemas.message_list import make_conversation, parse_messages


def parse(record: dict[str, Any], columns: dict[str, str]) -> Conversation:
    """A `system` beside the messages comes first.

    Raises:
        RecordError: a message is not one that chat templates take, all are blank, or `system` contradicts them.
    """
    key = columns["messages"]
    messages = parse_messages(field(record, key, list), key)
    conversation = make_conversation(messages, tools(record, columns["tools"]), key)
    return Conversation(begin_with_system(conversation.messages, record, columns, key), conversation.tools)


SCHEMA = Schema({"messages": ("messages",)}, parse, {"tools": ("tools",), **BESIDE})
