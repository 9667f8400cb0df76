"""`question` and `answer`, or other pairs of names: two strings, perhaps a `system` and a `history` before them."""

from __future__ import annotations

from chunkplan.intake.records import Conversation, Exchange, JsonObject
from chunkplan.intake.schemas.beside import BESIDE, exchange_after
from chunkplan.intake.schemas.fields import empty, field, is_blank
from chunkplan.intake.schemas.layout import Schema


def parse(record: JsonObject, columns: dict[str, str]) -> Exchange | Conversation:
    """Raises RecordError where one of the two is not a string, both are blank, or `history` has no exchanges."""
    if record.get(columns["question"]) is None or record.get(columns["answer"]) is None:
        columns = SCHEMA.keys_of(record, columns)
    question, answer = field(record, columns["question"], str), field(record, columns["answer"], str)
    if is_blank(question) and is_blank(answer):
        empty(f"`{columns['question']}` and `{columns['answer']}` are blank")
    return exchange_after(record, columns, question, answer)


SCHEMA = Schema(
    {
        "question": ("question", "problem", "query", "prompt", "input", "human"),
        "answer": ("answer", "solution", "response", "response", "output", "assistant"),
    },
    parse,
    BESIDE,
    is_paired=True,
)
