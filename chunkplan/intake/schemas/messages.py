"""`messages`: a conversation as chat templates take it, each message with a `role` and a `content`; or Gemini's."""

from __future__ import annotations

from chunkplan.intake.records import Conversation, JsonObject
from chunkplan.intake.schemas.beside import BESIDE_MESSAGES, begin_with_system, refuse_history
from chunkplan.intake.schemas.fields import messages_in, tools
from chunkplan.intake.schemas.layout import Schema
from chunkplan.intake.schemas.message_list import make_conversation, parse_messages


def parse(record: JsonObject, columns: dict[str, str]) -> Conversation:
    """The messages of a conversation; a `system` beside them comes first.

    Raises:
        RecordError: a message is not one that chat templates take, all are blank, or `system` contradicts them.
    """
    refuse_history(record, columns)
    key = columns["messages"]
    if record.get(key) is None:
        key = SCHEMA.keys_of(record, columns)["messages"]
    messages = parse_messages(messages_in(record, key), key)
    conversation = make_conversation(messages, tools(record, columns), key)
    return Conversation(begin_with_system(conversation.messages, record, columns, key), conversation.tools)


SCHEMA = Schema({"messages": ("messages", "contents")}, parse, BESIDE_MESSAGES)
