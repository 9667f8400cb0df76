"""Which keys of records nothing was made of: a user should hear of an answer that has another name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from chunkplan.intake.schemas.beside import is_label
from chunkplan.intake.schemas.layout import Layout
from chunkplan.intake.schemas.message_list import unread_of_turn
from chunkplan.intake.schemas.refused import MEDIA
from chunkplan.intake.schemas.registry import SCHEMAS

#: Of longer keys the beginning is named.
_LONGEST = 100


def count_unread(layout: Layout, records: Iterable[dict[str, Any]]) -> Counter[str]:
    """Key -> in how many of `records` it says something that did not go into their neutral form.

    The records are those that became one. Null says nothing. A key within the messages of a list is named
    `conversations[].key`.
    """
    counts: Counter[str] = Counter()
    schema, columns = SCHEMAS[layout.schema], layout.columns
    always_read = {key for role, key in columns.items() if role != "label"}.union(MEDIA)  # media there are none
    lists = [columns[role] for role in schema.required]
    for record in records:
        if not always_read.issuperset(record):
            read = schema.keys_of(record, columns)
            if "label" in read and not is_label(record.get(read["label"]), read["label"]):
                del read["label"]
            keys = set(record).difference(read.values(), MEDIA)
            counts.update({named(key) for key in keys if record[key] is not None})
        for key in lists:
            values = record.get(key)
            if type(values) is list and values and type(values[0]) is dict:
                counts.update({named(f"{key}[].{inner}") for turn in values for inner in unread_of_turn(turn)})
    return counts


def named(key: str) -> str:
    """A key as it is listed."""
    return key if len(key) <= _LONGEST else f"{key[:_LONGEST]}..."
