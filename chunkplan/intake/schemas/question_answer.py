"""`question` and `answer`: two strings, perhaps a `system` before them."""

from __future__ import annotations

from chunkplan.intake.records import Exchange, JsonObject
from chunkplan.intake.schemas.beside import BESIDE
from chunkplan.intake.schemas.fields import empty, field, is_blank, optional_text
from chunkplan.intake.schemas.layout import Schema


def parse(record: JsonObject, columns: dict[str, str]) -> Exchange:
    """Raises RecordError where one of the two is not a string, or both are blank."""
    question, answer = field(record, columns["question"], str), field(record, columns["answer"], str)
    if is_blank(question) and is_blank(answer):
        empty(f"`{columns['question']}` and `{columns['answer']}` are blank")
    return Exchange(optional_text(record, columns["system"]), question, answer)


SCHEMA = Schema({"question": ("question",), "answer": ("answer",)}, parse, BESIDE)
