"""`conversations`: the ShareGPT layout, messages with a `from` and a `value`."""

from __future__ import annotations

from chunkplan.intake.records import Conversation, JsonObject
from chunkplan.intake.schemas.beside import BESIDE_MESSAGES, begin_with_system, refuse_history
from chunkplan.intake.schemas.fields import messages_in, tools
from chunkplan.intake.schemas.layout import Schema
from chunkplan.intake.schemas.message_list import make_conversation, parse_messages


def parse(record: JsonObject, columns: dict[str, str]) -> Conversation:
    """The messages of a conversation; a `system` beside them comes first.

    Raises:
        RecordError: a message has an unknown speaker or is not text, all are blank, or `system` contradicts them.
    """
    refuse_history(record, columns)
    key = columns["conversations"]
    if record.get(key) is None:
        key = SCHEMA.keys_of(record, columns)["conversations"]
    messages = parse_messages(messages_in(record, key), key, is_sharegpt=True)
    conversation = make_conversation(messages, tools(record, columns), key)
    return Conversation(begin_with_system(conversation.messages, record, columns, key), conversation.tools)


SCHEMA = Schema({"conversations": ("conversations", "conversation")}, parse, BESIDE_MESSAGES)
