"""`text`: plain text."""

from __future__ import annotations

from chunkplan.intake.records import JsonObject, TextRecord
from chunkplan.intake.schemas.fields import empty, field
from chunkplan.intake.schemas.layout import Schema


def parse(record: JsonObject, columns: dict[str, str]) -> TextRecord:
    """Raises RecordError where the text is not a string, or blank."""
    text = field(record, columns["text"], str)
    if not text or text.isspace():
        empty(f"`{columns['text']}` is blank")
    return TextRecord(text)


SCHEMA = Schema({"text": ("text",)}, parse)
