"""`prompt` and `completion`: two strings, or two lists of messages, trained as one with loss on the second."""

from __future__ import annotations

from typing import NoReturn

from chunkplan.intake.records import Conversation, JsonObject, PromptRecord
from chunkplan.intake.schemas.beside import BESIDE_MESSAGES, begin_with_system, refuse_history, system_key
from chunkplan.intake.schemas.content import keys_of_content
from chunkplan.intake.schemas.fields import empty, field, is_blank, json_type, optional_text, tools, unsupported, wrong
from chunkplan.intake.schemas.flags import column_flags, line_of
from chunkplan.intake.schemas.layout import Schema
from chunkplan.intake.schemas.message_list import make_conversation, parse_messages


def parse(record: JsonObject, columns: dict[str, str]) -> PromptRecord | Conversation:
    """The prompt and its completion, or the messages of both; a `system` beside messages comes first.

    Raises:
        RecordError: the two are neither strings nor lists of messages, or both blank; strings have a `system` or
            `tools` beside them, which only chat templates know the place of; or `system` contradicts the messages.
    """
    refuse_history(record, columns)
    prompt_key, completion_key = columns["prompt"], columns["completion"]
    if type(record.get(prompt_key)) is list or type(record.get(completion_key)) is list:
        return _conversation(record, columns)
    prompt, completion = field(record, prompt_key, str), field(record, completion_key, str)
    if is_blank(prompt) and is_blank(completion):
        empty(f"`{prompt_key}` and `{completion_key}` are blank")
    system = system_key(record, columns)
    if optional_text(record, system) is not None:
        flags = line_of(column_flags({"question": prompt_key, "answer": completion_key}))
        reads_all = {*columns.values(), system}.issuperset(keys_of_content([record]))
        hint = f"{flags} reads all three as a conversation" if reads_all else "write the record as `messages`"
        _misplaced(system, hint)
    if tools(record, columns):
        key = next(columns[role] for role in ("tools", "functions") if record.get(columns[role]))
        _misplaced(key, "write the record as `messages`")
    return PromptRecord(prompt, completion)


def _misplaced(key: str, hint: str) -> NoReturn:
    unsupported(
        f"`{key}` beside a prompt that is a string: nothing says where in the text it belongs",
        hint=f"{hint}; remove `{key}` if it means another thing",
    )


def _conversation(record: JsonObject, columns: dict[str, str]) -> Conversation:
    prompt_key, completion_key = columns["prompt"], columns["completion"]
    prompt, completion = (record.get(key) for key in (prompt_key, completion_key))
    if type(prompt) is not list or type(completion) is not list:
        wrong(
            f"`{prompt_key}` is {json_type(prompt)} and `{completion_key}` is {json_type(completion)}, "
            "expected two strings or two lists of messages"
        )
    asked = [message._replace(loss=False) for message in parse_messages(prompt, prompt_key)]
    messages = [*asked, *parse_messages(completion, completion_key)]
    conversation = make_conversation(messages, tools(record, columns), completion_key)
    return Conversation(begin_with_system(conversation.messages, record, columns, prompt_key), conversation.tools)


SCHEMA = Schema({"prompt": ("prompt",), "completion": ("completion",)}, parse, BESIDE_MESSAGES)
