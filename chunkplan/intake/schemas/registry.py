"""The schemas by name, in the order of detection."""

from __future__ import annotations

from chunkplan.intake.schemas import (
    conversations,
    input_ids,
    instruction,
    length,
    messages,
    prompt_completion,
    question_answer,
    text,
)
from chunkplan.intake.schemas.layout import Schema

#: The more a schema says about the record, the earlier it is asked; a length only where there is nothing to train on.
#: Those of one group of `GROUPS` say as much: where a record fits two of them, what it says has to be the same.
SCHEMAS: dict[str, Schema] = {
    "messages": messages.SCHEMA,
    "conversations": conversations.SCHEMA,
    "prompt+completion": prompt_completion.SCHEMA,
    "instruction": instruction.SCHEMA,
    "question+answer": question_answer.SCHEMA,
    "input_ids": input_ids.SCHEMA,
    "text": text.SCHEMA,
    "length": length.SCHEMA,
}
GROUPS = (
    ("messages", "conversations"),
    ("prompt+completion", "instruction", "question+answer"),
    ("input_ids",),
    ("text",),
    ("length",),
)
