"""`prompt` and `completion`: two strings, or two lists of messages, trained as one with loss on the second."""

from __future__ import annotations

from typing import Any

from chunkplan.intake.records import Conversation, PromptRecord
from chunkplan.intake.schemas.fields import empty, field, is_blank, json_type, tools, wrong
from chunkplan.intake.schemas.layout import Schema
from chunkplan.intake.schemas.message_list import make_conversation, parse_messages


def parse(record: dict[str, Any], columns: dict[str, str]) -> PromptRecord | Conversation:
    """Raises RecordError where the two are neither strings nor lists of messages, or both blank."""
    prompt_key, completion_key = columns["prompt"], columns["completion"]
    if type(record.get(prompt_key)) is list or type(record.get(completion_key)) is list:
        return _conversation(record, columns)
    prompt, completion = field(record, prompt_key, str), field(record, completion_key, str)
    if is_blank(prompt) and is_blank(completion):
        empty(f"`{prompt_key}` and `{completion_key}` are blank")
    return PromptRecord(prompt, completion)


def _conversation(record: dict[str, Any], columns: dict[str, str]) -> Conversation:
    prompt_key, completion_key = columns["prompt"], columns["completion"]
    prompt, completion = (record.get(key) for key in (prompt_key, completion_key))
    if type(prompt) is not list or type(completion) is not list:
        wrong(
            f"`{prompt_key}` is {json_type(prompt)} and `{completion_key}` is {json_type(completion)}, "
            "expected two strings or two lists of messages"
        )
    asked = [message._replace(loss=False) for message in parse_messages(prompt, prompt_key)]
    messages = [*asked, *parse_messages(completion, completion_key)]
    return make_conversation(messages, tools(record, columns["tools"]), completion_key)


SCHEMA = Schema({"prompt": ("prompt",), "completion": ("completion",)}, parse, {"tools": ("tools",)})
