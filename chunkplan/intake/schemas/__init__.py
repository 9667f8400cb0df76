"""Schemas: how a source's records are laid out, detected from its first record; one schema a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chunkplan.errors import DataError
from chunkplan.intake.records import Record
from chunkplan.intake.schemas import conversations, messages, prompt_completion, text


@dataclass(frozen=True)
class Schema:
    """A record has this schema if it has all of `keys`; `parse(record, where)` gives its neutral form."""

    keys: tuple[str, ...]
    parse: Callable[[dict[str, Any], str], Record]


#: In the order of detection: the more a schema says about the record, the earlier it is asked.
SCHEMAS: dict[str, Schema] = {
    "messages": Schema(("messages",), messages.parse),
    "conversations": Schema(("conversations",), conversations.parse),
    "prompt+completion": Schema(("prompt", "completion"), prompt_completion.parse),
    "text": Schema(("text",), text.parse),
}

_PREFERENCE = ("chosen", "rejected")


def detect_schema(record: dict[str, Any], where: str) -> str:
    """The name of the schema of a source whose first record is `record`.

    Raises:
        DataError: no schema fits.
    """
    _refuse_preferences(record, where)
    for name, schema in SCHEMAS.items():
        if record.keys() >= set(schema.keys):
            return name
    found = ", ".join(f"`{key}`" for key in record) or "none"
    known = "; ".join(" and ".join(f"`{key}`" for key in schema.keys) for schema in SCHEMAS.values())
    raise DataError(
        f"no schema fits a record with the keys {found}; known are: {known}", where=where, hint="rename the keys"
    )


def parse_record(schema: str, record: dict[str, Any], where: str) -> Record:
    """The neutral form of a record of a source that has `schema`.

    Raises:
        DataError: the record does not fit the schema.
    """
    _refuse_preferences(record, where)
    missing = [f"`{key}`" for key in SCHEMAS[schema].keys if key not in record]
    if missing:
        found = ", ".join(f"`{key}`" for key in record) or "none"
        raise DataError(
            f"{' and '.join(missing)} missing, found the keys {found}; the first record made this file {schema}",
            where=where,
            hint="put records of different schemas into different files",
        )
    return SCHEMAS[schema].parse(record, where)


def _refuse_preferences(record: dict[str, Any], where: str) -> None:
    if all(key in record for key in _PREFERENCE):
        raise DataError(
            "a preference pair (`chosen` and `rejected`); one record has to be one sequence",
            where=where,
            hint="keep the chosen answer as a record with `messages` or `prompt` and `completion`",
        )
