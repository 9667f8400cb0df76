"""`text`: plain text."""

from __future__ import annotations

from chunkplan.intake.records import JsonObject, TextRecord
from chunkplan.intake.schemas.fields import empty, field
from chunkplan.intake.schemas.layout import Schema


def parse(record: JsonObject, columns: dict[str, str]) -> TextRecord:
    """Raises RecordError where the text is not a string, or blank."""
    key = columns["text"]
    if key not in record:
        key = SCHEMA.keys_of(record, columns)["text"]
    text = field(record, key, str)
    if not text or text.isspace():
        empty(f"`{key}` is blank")
    return TextRecord(text)


SCHEMA = Schema({"text": ("text", "content")}, parse)
