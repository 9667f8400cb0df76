"""Finds out how a source's records are laid out, from the first of them and what the user says about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from chunkplan.config.intake import Said
from chunkplan.errors import DataError, UsageError
from chunkplan.intake.records import JsonObject
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.schemas.beside import is_label
from chunkplan.intake.schemas.fields import MOST_LISTED, listed, messages_in, quoted, shortened
from chunkplan.intake.schemas.flags import TRY, Flag, LayoutError, column_flags, spaced
from chunkplan.intake.schemas.layout import RecordLayout, has_all
from chunkplan.intake.schemas.readings import Reading, choose_reading
from chunkplan.intake.schemas.refused import refuse
from chunkplan.intake.schemas.registry import SCHEMAS
from chunkplan.intake.schemas.suggestion import suggest, unread_content
from chunkplan.intake.schemas.what_to_write import SAY, are_messages_each, what_else


def detect(
    records: Sequence[JsonObject], *, schema: str | None = None, columns: Mapping[str, str] | None = None
) -> RecordLayout:
    """The layout of a source that begins with `records`.

    It is the schema that all records fit best; single ones that fit none are left to be rejected. Roles that `columns`
    names leave only the schemas that have them.

    Args:
        records: the first that can be read.
        schema: the name of the schema, where the user says it.
        columns: role -> key, where the user says it.

    Raises:
        UsageError: there is no such schema or role.
        LayoutError: no schema fits, records want different ones, one can be read in two ways that differ, or no record
            has a key that the user named.
        DataError: there is no record.
    """
    columns = Said.of(columns or {})
    candidates = _candidates(schema, columns)
    readable = _readable(records)
    missing = [role for role, key in columns.items() if readable and not any(key in record for record in readable)]
    if missing:
        raise _no_key(missing, columns, candidates, readable)
    chosen = [choose_reading(record, candidates, columns, is_chosen=schema is not None) for record in readable]
    are_null = [_is_null(record, candidates, columns) for record in readable]
    wanted = Counter(None if reading is None else reading.schema for reading in chosen)
    resolved = {name: _resolve(name, columns, readable, chosen) for name in candidates}
    num_unfit = wanted.pop(None, 0) - sum(are_null)
    if schema is not None and (wanted or not readable):
        evidence = f"--format {schema}{_evidence(schema, resolved[schema], readable)}"
        return RecordLayout(schema, resolved[schema], evidence)
    names = [name for name in wanted if name is not None]
    if len(names) == 1 and wanted[names[0]] >= num_unfit:
        name = names[0]
        return RecordLayout(name, resolved[name], _evidence(name, resolved[name], readable).removeprefix(": "))
    if len(names) > 1:
        several = ", ".join(f"{wanted[name]} {name}" for name in names)
        raise LayoutError(
            f"the records are of different schemas: {several}; found: {_found(readable)}",
            ["put them into different files, or ", *SAY],
        )
    if not readable:
        raise DataError("no record can be read", hint="give files with at least one record")
    raise _no_schema(schema, columns, candidates, readable)


def _no_key(missing: list[str], columns: Said, candidates: list[str], records: list[JsonObject]) -> LayoutError:
    """The error of keys that the user has named for the roles `missing`, and that no record has."""
    found = suggest(records, candidates, {role: key for role, key in columns.items() if role not in missing})
    role, place = missing[0], columns.place(missing[0], "--column")
    words: Sequence[str | Flag] = ["name a key that the records have"]
    if found and set(missing) <= found[1].keys():
        is_typed = place.startswith("--column")
        words = (
            ["in place of it, ", TRY, *spaced(column_flags(found[1]))] if is_typed else [f"is it `{found[1][role]}`?"]
        )
    message = f"no record has the key `{columns[role]}` of {place}; found: {_found(records)}"
    return LayoutError(message, words, missing=missing)


def _no_schema(schema: str | None, columns: Said, candidates: list[str], records: list[JsonObject]) -> LayoutError:
    """The error of records that no schema fits, or not the one that the user has named."""
    found = None if not columns and are_messages_each(records) else suggest(records, candidates, columns)
    closest = _closest(candidates, columns, records) if found is None else (found[0], SCHEMAS[found[0]].choices({})[0])
    message = f"no schema fits the keys of the records: {_found(records)}"
    if schema is not None:
        message += f"; --format {schema} expects {_needs(schema)}"
    elif closest is not None:
        message += f"; closest is {closest[0]} ({_all_of(closest[1])})"
    if schema is not None and (other := _other_schema(columns, records)) is not None:
        return LayoutError(message, ["in place of it, ", TRY, Flag("--format", other)])
    if found is not None:
        return LayoutError(message, [TRY, *spaced(column_flags(found[1]))])
    return LayoutError(message, what_else(records, candidates, columns))


def is_null(record: JsonObject, schema: str | None, columns: Mapping[str, str]) -> bool:
    """Whether `record` fits no schema, or not the one that the user has named, only as what it would have is null.

    Raises:
        UsageError: there is no such schema or role.
    """
    said = Said.of(columns)
    return None in record.values() and _is_null(record, _candidates(schema, said), said)


def _is_null(record: JsonObject, names: list[str], columns: Mapping[str, str]) -> bool:
    if None not in record.values():
        return False
    choices = [keys for name in names for keys in SCHEMAS[name].choices(columns)]
    fits = any(has_all(record, keys) for keys in choices)
    return not fits and any(all(key in record for key in keys.values()) for keys in choices)


def _other_schema(columns: Said, records: list[JsonObject]) -> str | None:
    """The schema that reads all content of these records, where the user has named another."""
    with suppress(DataError, UsageError):
        layout = detect(records, columns=columns)
        return None if unread_content(layout, records) else layout.schema
    return None


def _candidates(schema: str | None, columns: Said) -> list[str]:
    """The schemas that fit what the user says, by name."""
    if schema is not None and schema not in SCHEMAS:
        raise UsageError(f"--format {schema}: there is no such schema", hint=f"it is one of {', '.join(SCHEMAS)}")
    names = [schema] if schema is not None else list(SCHEMAS)
    for role in columns:
        if not any(role in SCHEMAS[name].roles for name in names):
            roles = dict.fromkeys(role for name in names for role in SCHEMAS[name].roles)
            none = f"{schema} has no such role" if schema else "no schema has such a role"
            raise UsageError(
                f"{columns.place(role, '--column')}: {none}",
                hint=f"roles are {', '.join(roles)}",
            )
    fitting = [name for name in names if columns.keys() <= SCHEMAS[name].roles.keys()]
    if not fitting:
        roles_of = "; ".join(f"{name}: {', '.join(SCHEMAS[name].roles)}" for name in names)
        raise UsageError(f"no schema has all of the roles {', '.join(columns)}", hint=f"roles are: {roles_of}")
    return fitting


def _readable(records: Sequence[JsonObject]) -> list[JsonObject]:
    """The records that are not refused; raises the first RecordError if all are."""
    readable, refused = [], None
    for record in records:
        try:
            refuse(record)
        except RecordError as error:
            refused = refused or error
        else:
            readable.append(record)
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
    required, optional = SCHEMAS[name].required, SCHEMAS[name].optional
    number = sum(has_all(record, _required(name, columns, record)) for record in records)
    where = "the first record" if len(records) == 1 else f"{number} of the first {len(records)} records"
    keys = [f"`{columns[role]}`{'' if columns[role] in usual else f' ({role})'}" for role, usual in required.items()]
    text = f": {' and '.join(keys)} in {where}"
    others = [columns[role] for role in optional if any(_is_said(role, columns[role], record) for record in records)]
    if others:
        text += f", some with {quoted(others)}"
    roles = _roles([value for record in records for value in _values(name, columns, record)])
    return text + (f"; roles {listed(roles[:MOST_LISTED], len(roles))}" if roles else "")


def _required(name: str, columns: dict[str, str], record: JsonObject) -> dict[str, str]:
    """The keys that `record` itself has for the required roles."""
    keys = SCHEMAS[name].keys_of(record, columns)
    return {role: keys[role] for role in SCHEMAS[name].required}


def _values(name: str, columns: dict[str, str], record: JsonObject) -> list[Any]:
    """What `record` has for the required roles; messages that are written as JSON, decoded."""
    values = []
    for role, key in _required(name, columns, record).items():
        value = record.get(key)
        if type(value) is str and role in ("messages", "conversations"):
            with suppress(RecordError):
                value = messages_in(record, key)
        values.append(value)
    return values


def _is_said(role: str, key: str, record: JsonObject) -> bool:
    """Whether `record` says something for an optional role; a label that is false does."""
    value = record.get(key)
    return value is not None and is_label(value, key) if role == "label" else bool(value)


def _roles(values: list[Any]) -> list[str]:
    """The roles of messages, in the lists of messages among `values`, each once."""
    messages = [message for value in values if isinstance(value, list) for message in value[:100]]
    return list(
        dict.fromkeys(
            shortened(str(message.get("role") or message.get("from")))
            for message in messages
            if isinstance(message, dict) and (message.get("role") or message.get("from"))
        )
    )


def _found(records: list[JsonObject]) -> str:
    counts = Counter(key for record in records for key in record)
    said = {key for record in records for key, value in record.items() if value is not None}
    most = [
        f"`{shortened(key)}` in {count} of {len(records)}{'' if key in said else ', always null'}"
        for key, count in counts.most_common(MOST_LISTED)
    ]
    return listed(most, len(counts)) or "no keys"


def _closest(names: list[str], columns: Said, records: list[JsonObject]) -> tuple[str, dict[str, str]] | None:
    """The schema most of whose keys the records have, the first of equals, and these keys; None for none."""
    found = Counter(key for record in records for key, value in record.items() if value is not None)
    choices = [(name, keys) for name in names for keys in SCHEMAS[name].choices(columns)]
    share, index = max(
        (sum(map(found.__getitem__, keys.values())) / len(keys), -index) for index, (_, keys) in enumerate(choices)
    )
    return choices[-index] if share else None


def _needs(name: str) -> str:
    """The keys that a schema requires: "`prompt` and `completion`"; one of several has "or" between."""
    schema = SCHEMAS[name]
    if schema.is_paired:
        return " or ".join(map(_all_of, schema.choices({})))
    return " and ".join(" or ".join(f"`{key}`" for key in keys) for keys in schema.required.values())


def _all_of(keys: Mapping[str, str]) -> str:
    return " and ".join(f"`{key}`" for key in keys.values())
