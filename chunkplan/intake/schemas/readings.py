"""The ways in which a record can be read: by which schema, with which keys. None is chosen by guessing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chunkplan.intake.records import JsonObject, Record
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.schemas.fields import quoted
from chunkplan.intake.schemas.flags import CHOOSE, LayoutError, column_flags, spaced
from chunkplan.intake.schemas.layout import has_all
from chunkplan.intake.schemas.registry import GROUPS, SCHEMAS
from chunkplan.intake.schemas.roles import is_message


@dataclass(frozen=True)
class Reading:
    """A schema that a record fits, and the keys of its required roles: role -> key."""

    schema: str
    keys: dict[str, str]

    @property
    def words(self) -> str:
        """The reading for people: "question+answer of `problem` and `solution`"."""
        return f"{self.schema} of {' and '.join(quoted([key]) for key in self.keys.values())}"


def choose_reading(
    record: JsonObject, names: Sequence[str], named: Mapping[str, str], *, is_chosen: bool
) -> Reading | None:
    """How `record` is read by one of the schemas `names`, where the user has `named` the keys of some roles, or None.

    Of the schemas that say most about the record, the first that it fits. Another that says as much has to make the
    same of it, or to read only a part of what the first reads. `is_chosen` says that the user has named the schema.

    Raises:
        LayoutError: two schemas, or two keys, make different things of it.
    """
    for group in GROUPS:
        found = [
            Reading(name, keys)
            for name in group
            if name in names
            for keys in SCHEMAS[name].choices(named)
            if has_all(record, keys) and (is_chosen or named.keys() & keys or _may_be(name, keys, record))
        ]
        if len(found) > 1:
            return _only(record, found, named)
        if found:
            return found[0]
    return None


def _may_be(name: str, keys: Mapping[str, str], record: JsonObject) -> bool:
    """Whether what `record` has under these keys may be what the schema `name` means.

    That is asked of names that mean other things as well; and of a length, beside which nothing may look like text.
    """
    if name == "length":
        return not any(
            isinstance(value, (list, dict)) or (isinstance(value, str) and len(value.split(maxsplit=1)) > 1)
            for value in record.values()
        )
    if name == "text" and (is_message(record) or ("role" in record and keys["text"] != "text")):
        return False  # it is one message of a conversation
    if name in ("text", "question+answer") and any(role != key for role, key in keys.items()):
        return all(type(record[key]) is str for key in keys.values())
    if name == "messages" and keys["messages"] == "contents":  # Gemini's
        value = record["contents"]
        return type(value) is list and bool(value) and type(value[0]) is dict and "parts" in value[0]
    if name == "conversations" and keys["conversations"] == "conversation":
        value = record["conversation"]
        return type(value) is list or (type(value) is str and value.lstrip().startswith("["))
    return True


def _only(record: JsonObject, found: list[Reading], named: Mapping[str, str]) -> Reading:
    """The first of these readings of `record` that can be parsed; raises LayoutError where another differs from it."""
    first: tuple[Reading, Record, set[str]] | None = None
    for reading in found:
        schema = SCHEMAS[reading.schema]
        columns = {role: named.get(role, usual[0]) for role, usual in schema.roles.items()} | reading.keys
        try:
            parsed = schema.parse(record, columns)
        except (RecordError, RecursionError):
            continue
        if first is None:
            first = reading, parsed, set(schema.keys_of(record, columns).values())
        elif parsed != first[1] and not first[2].issuperset(reading.keys.values()):
            # Of numbers nothing is trained; of all else a flag would lose what is read in the other way alone.
            words = [CHOOSE, *spaced(column_flags(first[0].keys)), ", or ", *spaced(column_flags(reading.keys))]
            if reading.schema != "length":
                words = ["they are two sequences: write a record for each, or take away the key that is not trained"]
            raise LayoutError(
                f"a record can be read in two ways that differ: {first[0].words}, or {reading.words}", words
            )
    return found[0] if first is None else first[0]
