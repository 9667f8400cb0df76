"""`length`: how many tokens a record has, and nothing else of it."""

from __future__ import annotations

from chunkplan.intake.records import JsonObject, LengthRecord
from chunkplan.intake.schemas.fields import empty, json_type, wrong
from chunkplan.intake.schemas.layout import Schema

_LONGEST = 2**31 - 1


def parse(record: JsonObject, columns: dict[str, str]) -> LengthRecord:
    """Raises RecordError where the length is not a whole number of tokens, or 0."""
    key = SCHEMA.keys_of(record, columns)["length"]
    length = record.get(key)
    if type(length) is not int:
        found = json_type(length) if key in record else "missing"
        wrong(f"`{key}` is {f'{length}' if type(length) is float else found}, expected a whole number of tokens")
    if not length:
        empty(f"`{key}` is 0")
    if not 0 < length <= _LONGEST:
        wrong(f"`{key}` is {length}, expected 1 to {_LONGEST} tokens")
    return LengthRecord(length)


SCHEMA = Schema({"length": ("length", "num_tokens", "n_tokens", "token_count")}, parse)
