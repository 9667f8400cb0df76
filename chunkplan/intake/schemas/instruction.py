"""`instruction`, perhaps an `input`, and `output` or `response`: the layout of Alpaca."""

from __future__ import annotations

from chunkplan.intake.records import Conversation, Exchange, JsonObject
from chunkplan.intake.schemas.beside import BESIDE, exchange_after
from chunkplan.intake.schemas.fields import empty, field, is_blank, optional_text
from chunkplan.intake.schemas.layout import Schema


def parse(record: JsonObject, columns: dict[str, str]) -> Exchange | Conversation:
    """Raises RecordError where one of the texts is not a string, all are blank, or `history` has no exchanges."""
    columns = SCHEMA.keys_of(record, columns)
    prompt, output = field(record, columns["instruction"], str), field(record, columns["output"], str)
    addition = optional_text(record, columns["input"])
    if addition is not None:
        prompt = f"{prompt}\n{addition}" if prompt else addition
    if is_blank(prompt) and is_blank(output):
        empty(f"`{columns['instruction']}` and `{columns['output']}` are blank")
    return exchange_after(record, columns, prompt, output)


SCHEMA = Schema(
    {"instruction": ("instruction",), "output": ("output", "response")},
    parse,
    {"input": ("input", "context"), **BESIDE},
)
