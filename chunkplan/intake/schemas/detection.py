"""Finds out how a source's records are laid out, from the first of them and what the user says about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from chunkplan.config.intake import IN_MESSAGES, SourceOverrides
from chunkplan.errors import DataError, UsageError
from chunkplan.intake.records import JsonObject, RecordError
from chunkplan.intake.schemas.fields import (
    MOST_LISTED,
    TRY,
    LayoutError,
    column_flags,
    listed,
    messages_in,
    quoted,
    shortened,
)
from chunkplan.intake.schemas.messages import objects_in, refuse
from chunkplan.intake.schemas.readings import (
    SAY,
    Reading,
    are_messages_each,
    choose_reading,
    fallback_hint,
    suggest,
    unread_content,
)
from chunkplan.intake.schemas.table import SCHEMAS, RecordLayout, has_all, is_label


def detect(
    records: Sequence[JsonObject], *, schema: str | None = None, columns: Mapping[str, str] | None = None
) -> RecordLayout:
    """Choose the schema that fits all of a source's first records best; single ones that fit none are rejected later.

    Args:
        records: the first readable records.
        schema: the name of the schema, where the user names it.
        columns: role -> key, where the user names some; they leave only the schemas that have these roles.

    Raises:
        UsageError: there is no such schema or role.
        LayoutError: no schema fits, records fit different ones, one can be read in two ways, or a named key is missing.
        DataError: there is no record.
    """
    columns = SourceOverrides.of(columns or {})
    candidates = _candidates(schema, columns)
    readable = _readable(records, is_pair=schema in (None, "preference"))
    missing = [role for role, key in columns.items() if readable and not any(key in record for record in readable)]
    if missing:
        raise _no_key(missing, columns, candidates, readable)
    chosen = [choose_reading(record, candidates, columns, is_chosen=schema is not None) for record in readable]
    num_unfit = sum(
        reading is None and not _is_null(record, candidates, columns)
        for record, reading in zip(readable, chosen, strict=True)
    )
    wanted = Counter(reading.schema for reading in chosen if reading is not None)
    if schema is not None and (wanted or not readable):
        resolved = _resolve(schema, columns, readable, chosen)
        return RecordLayout(schema, resolved, f"--format {schema}{_evidence(schema, resolved, readable)}")
    if len(wanted) == 1 and wanted.total() >= num_unfit:
        [name] = wanted
        resolved = _resolve(name, columns, readable, chosen)
        return RecordLayout(name, resolved, _evidence(name, resolved, readable).removeprefix(": "))
    if len(wanted) > 1:
        several = ", ".join(f"{number} {name}" for name, number in wanted.items())
        message = f"the records are of different schemas: {several}; found: {_found(readable)}"
        raise LayoutError(message, hint=f"put them into different files, or {SAY}")
    if not readable:
        raise DataError("no record can be read", hint="give files with at least one record")
    raise _no_schema(schema, columns, candidates, readable)


def columns_inside(columns: Mapping[str, str]) -> tuple[SourceOverrides, dict[str, str]]:
    """Split the user's columns into those of keys of records and those of keys of the messages within them."""
    said = SourceOverrides.of(columns)
    outside = {role: key for role, key in said.items() if role not in IN_MESSAGES}
    return SourceOverrides(outside, said.places, said.optional), {r: key for r, key in said.items() if r in IN_MESSAGES}


def refuse_missing(inside: Mapping[str, str], columns: Mapping[str, str], records: Iterable[JsonObject]) -> None:
    """Raise LayoutError for a key of messages that the user has named in `columns`, and none in `records` has."""
    if inside:
        found = {key for record in records for value in record.values() for one in objects_in(value) for key in one}
        for role in ("role", "content"):
            if role in inside and inside[role] not in found:
                place = SourceOverrides.of(columns).place(role, "--column")
                message = f"no message has the key `{inside[role]}` of {place}; found: {quoted(sorted(found))}"
                raise LayoutError(message, hint="name a key that the messages have")


def is_null(record: JsonObject, schema: str | None, columns: Mapping[str, str]) -> bool:
    """Return whether `record` fits no schema only as keys are null; raises UsageError for an unknown schema or role."""
    said = SourceOverrides.of(columns)
    return None in record.values() and _is_null(record, _candidates(schema, said), said)


def _is_null(record: JsonObject, names: list[str], columns: Mapping[str, str]) -> bool:
    if None not in record.values():
        return False
    choices = [keys for name in names for keys in SCHEMAS[name].choices(columns)]
    fits = any(has_all(record, keys) for keys in choices)
    return not fits and any(all(key in record for key in keys.values()) for keys in choices)


def _candidates(schema: str | None, columns: SourceOverrides) -> list[str]:
    """The schemas that fit what the user says, by name."""
    if schema is not None and schema not in SCHEMAS:
        raise UsageError(f"--format {schema}: there is no such schema", hint=f"it is one of {', '.join(SCHEMAS)}")
    names = [schema] if schema is not None else list(SCHEMAS)
    roles = dict.fromkeys(role for name in names for role in SCHEMAS[name].roles)
    more = IN_MESSAGES if "messages" in roles or "conversations" in roles else ()
    for role in columns:
        if role not in roles:
            none = f"{schema} has no such role" if schema else "no schema has such a role"
            raise UsageError(
                f"{columns.place(role, '--column')}: {none}", hint=f"roles are {', '.join((*roles, *more))}"
            )
    fitting = [name for name in names if columns.keys() <= SCHEMAS[name].roles.keys()]
    if not fitting:
        roles_of = "; ".join(f"{name}: {', '.join(SCHEMAS[name].roles)}" for name in names)
        raise UsageError(f"no schema has all of the roles {', '.join(columns)}", hint=f"roles are: {roles_of}")
    return fitting


def _readable(records: Sequence[JsonObject], is_pair: bool) -> list[JsonObject]:
    """The records that are not refused; raises the first RecordError if all are."""
    readable, refused = [], None
    for record in records:
        try:
            refuse(record, is_pair=is_pair)
            readable.append(record)
        except RecordError as error:
            refused = refused or error
    if refused is not None and not readable:
        raise refused
    return readable


def _resolve(
    name: str, columns: Mapping[str, str], records: list[JsonObject], chosen: list[Reading | None]
) -> dict[str, str]:
    """Role -> key: as the user says, else of its usual keys those that most records have."""
    schema = SCHEMAS[name]
    found = Counter(key for record in records for key, value in record.items() if value is not None)
    resolved = {
        role: columns.get(role) or max(keys, key=lambda key: found[key])  # the first of equals
        for role, keys in schema.roles.items()
    }
    read = Counter(tuple(reading.keys.items()) for reading in chosen if reading is not None and reading.schema == name)
    required = dict(read.most_common(1)[0][0]) if read else schema.choices(columns)[0]
    return resolved | required


def _evidence(name: str, columns: dict[str, str], records: list[JsonObject]) -> str:
    """ ": `prompt` and `body` (completion) in 3 of the first 4 records", and what else there is; "" of no records."""
    if not records:
        return ""
    schema = SCHEMAS[name]
    own = [{role: schema.keys_of(record, columns)[role] for role in schema.required} for record in records]
    number = sum(map(has_all, records, own))
    where = "the first record" if len(records) == 1 else f"{number} of the first {len(records)} records"
    keys = [
        f"`{columns[role]}`{'' if columns[role] in keys else f' ({role})'}" for role, keys in schema.required.items()
    ]
    text = f": {' and '.join(keys)} in {where}"
    num_set = {columns[role]: sum(_is_set(role, columns[role], one) for one in records) for role in schema.optional}
    in_all = [key for key, count in num_set.items() if count == len(records)]
    in_some = [key for key, count in num_set.items() if 0 < count < len(records)]
    text += f", with {quoted(in_all)}" if in_all else ""
    text += f", some with {quoted(in_some)}" if in_some else ""
    roles = dict.fromkeys(
        shortened(str(role))
        for record, keys in zip(records, own, strict=True)
        for one, key in keys.items()
        for message in _messages_under(record, one, key)[:100]
        if isinstance(message, dict) and (role := message.get("role") or message.get("from"))
    )
    return text + (f"; roles {listed([*roles][:MOST_LISTED], len(roles))}" if roles else "")


def _messages_under(record: JsonObject, role: str, key: str) -> list[Any]:
    """The list under `key` of a required role, which messages may be written as JSON; nothing where it is none."""
    value = record.get(key)
    if type(value) is str and role in ("messages", "conversations"):
        with suppress(RecordError):
            return messages_in(record, key)
    return value if isinstance(value, list) else []


def _is_set(role: str, key: str, record: JsonObject) -> bool:
    """Return whether `record` has a value for an optional role; a label that is false is one."""
    value = record.get(key)
    return value is not None and is_label(value, key) if role == "label" else bool(value)


def _no_key(
    missing: list[str], columns: SourceOverrides, candidates: list[str], records: list[JsonObject]
) -> LayoutError:
    """The error of keys that the user has named for the roles `missing`, and that no record has."""
    found = suggest(records, candidates, {role: key for role, key in columns.items() if role not in missing})
    role, place = missing[0], columns.place(missing[0], "--column")
    hint = "name a key that the records have"
    if found and set(missing) <= found[1].keys():
        is_typed = place.startswith("--column")
        hint = f"in place of it, {TRY}{column_flags(found[1])}" if is_typed else f"is it `{found[1][role]}`?"
    message = f"no record has the key `{columns[role]}` of {place}; found: {_found(records)}"
    return LayoutError(message, hint=hint, missing=missing)


def _no_schema(
    schema: str | None, columns: SourceOverrides, candidates: list[str], records: list[JsonObject]
) -> LayoutError:
    """The error of records that no schema fits, or not the one that the user has named."""
    found = None if not columns and are_messages_each(records) else suggest(records, candidates, columns)
    message = f"no schema fits the keys of the records: {_found(records)}"
    if schema is not None:
        message += f"; --format {schema} expects {_needs(schema)}"
        if (other := _other_schema(columns, records)) is not None:
            return LayoutError(message, hint=f"in place of it, {TRY}--format {other}")
    elif found is not None:
        message += f"; closest is {found[0]} ({_all_of(SCHEMAS[found[0]].choices({})[0])})"
    elif closest := _closest(candidates, columns, records):
        message += f"; closest is {closest[0]} ({_all_of(closest[1])})"
    if found is not None:
        return LayoutError(message, hint=TRY + column_flags(found[1]))
    return LayoutError(message, hint=fallback_hint(records, candidates, columns))


def _other_schema(columns: Mapping[str, str], records: list[JsonObject]) -> str | None:
    """Return the schema that reads all content of these records, where the user has named another."""
    with suppress(DataError, UsageError):
        layout = detect(records, columns=columns)
        return None if unread_content(layout, records) else layout.schema
    return None


def _found(records: list[JsonObject]) -> str:
    counts = Counter(key for record in records for key in record)
    said = {key for record in records for key, value in record.items() if value is not None}
    most = [
        f"`{shortened(key)}` in {count} of {len(records)}{'' if key in said else ', always null'}"
        for key, count in counts.most_common(MOST_LISTED)
    ]
    return listed(most, len(counts)) or "no keys"


def _closest(
    names: list[str], columns: SourceOverrides, records: list[JsonObject]
) -> tuple[str, dict[str, str]] | None:
    """Return the schema most of whose keys the records have, the first of equals, with these keys; None for none."""
    found = Counter(key for record in records for key, value in record.items() if value is not None)

    def share(choice: tuple[str, dict[str, str]]) -> float:
        return sum(found[key] for key in choice[1].values()) / len(choice[1])

    best = max(((name, keys) for name in names for keys in SCHEMAS[name].choices(columns)), key=share)
    return best if share(best) else None


def _needs(name: str) -> str:
    """The keys that a schema requires: "`prompt` and `completion`"; one of several has "or" between."""
    schema = SCHEMAS[name]
    if schema.is_paired:
        return " or ".join(map(_all_of, schema.choices({})))
    return " and ".join(" or ".join(f"`{key}`" for key in keys) for keys in schema.required.values())


def _all_of(keys: Mapping[str, str]) -> str:
    return " and ".join(f"`{key}`" for key in keys.values())
