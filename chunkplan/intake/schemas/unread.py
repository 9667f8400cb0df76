"""Counts the keys of records that were not read: a user should see that an answer has another name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from chunkplan.intake.records import JsonObject
from chunkplan.intake.schemas.beside import is_label, system_key
from chunkplan.intake.schemas.fields import messages_in
from chunkplan.intake.schemas.layout import RecordLayout, Schema
from chunkplan.intake.schemas.loss_flags import FLAGS
from chunkplan.intake.schemas.marks import ignored_in, without_ignored
from chunkplan.intake.schemas.message_list import unread_of_turn
from chunkplan.intake.schemas.refused import MEDIA
from chunkplan.intake.schemas.registry import SCHEMAS

#: The most characters of a key that are listed.
_LONGEST = 100


def count_unread(layout: RecordLayout, records: Iterable[JsonObject]) -> Counter[str]:
    """Key -> in how many of `records` it says something that did not go into their neutral form.

    The records are those that became one. Null says nothing. A key within the messages of a list is named
    `conversations[].key`.
    """
    schema, columns = SCHEMAS[layout.schema], layout.columns
    surely = schema.required if schema.reads else columns.keys() - {"label"}
    always_read = {columns[role] for role in surely}.union(MEDIA)  # media there are none
    perhaps_read = schema.all_keys(columns) - always_read
    lists = {role: columns[role] for role in schema.required}
    are_messages = not lists.keys().isdisjoint(("messages", "conversations"))
    counts: dict[str, int] = {}
    for record in records:
        found: set[str] = set()
        ignored = ignored_in(record, layout.ignored) if layout.ignored else found
        record = without_ignored(record, layout.ignored)
        if not always_read.issuperset(record):
            found = {key for key in record.keys() - always_read if record[key] is not None}
            if not found.isdisjoint(perhaps_read):
                found = {key for key in record.keys() - set(MEDIA) if record[key] is not None}
                found -= _read(schema, columns, record)
            if not FLAGS.isdisjoint(found) and layout.schema not in ("input_ids", "length"):
                found -= {key for key in FLAGS & found if type(record[key]) is not str or key == "mask"}
        for role, key in lists.items():
            if key not in record:
                key = schema.keys_of(record, columns)[role]
            values = record.get(key)
            if type(values) is str and are_messages:
                values = messages_in(record, key)
            if type(values) is list and values and type(values[0]) is dict:
                for turn in values:
                    if len(turn) > 2:
                        found.update(f"{key}[].{inner}" for inner in unread_of_turn(turn))
        found |= ignored
        if found and max(map(len, found)) > _LONGEST:
            found = set(map(named, found))  # keys that begin alike are one
        for key in found:
            counts[key] = counts.get(key, 0) + 1
    return Counter(counts)


def _read(schema: Schema, columns: dict[str, str], record: JsonObject) -> set[str]:
    """The keys of `record` that are read."""
    if schema.reads:
        return {*(columns[role] for role in schema.required), *schema.reads(record, columns)}
    return {*read_keys(schema, columns, record).values()}


def read_keys(schema: Schema, columns: dict[str, str], record: JsonObject) -> dict[str, str]:
    """The keys that `record` itself has for its roles: role -> key."""
    keys = schema.keys_of(record, columns)
    if "system" in keys:
        keys["system"] = system_key(record, columns)
    if "label" in keys and not is_label(record.get(keys["label"]), keys["label"]):
        del keys["label"]
    return keys


def named(key: str) -> str:
    """The name of a key in lists: long ones are cut."""
    return key if len(key) <= _LONGEST else f"{key[:_LONGEST]}..."
