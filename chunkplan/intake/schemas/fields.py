"""What the schemas share: values of a record, checked, with errors that name the user's own key."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import msgspec

from chunkplan.intake.records import JsonObject
from chunkplan.intake.rejection import RecordError

T = TypeVar("T", bool, str, list[Any], JsonObject)

HINT = "fix this record, or leave it out"

_TYPES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
_EXPECTED = {bool: "true or false", str: "a string", list: "a list", dict: "an object"}


def json_type(value: object) -> str:
    """The JSON name of a value's type, with its article; values of tables may be of other types."""
    return _TYPES.get(type(value), f"a {type(value).__name__}")


def wrong(message: str, hint: str = HINT) -> NoReturn:
    """Raises RecordError: keys or types are not those of the schema."""
    raise RecordError(message, reason="schema", hint=hint)


def unsupported(message: str, hint: str = HINT) -> NoReturn:
    """Raises RecordError: this is not planned."""
    raise RecordError(message, reason="unsupported", hint=hint)


def empty(message: str) -> NoReturn:
    """Raises RecordError: there is nothing to train on."""
    raise RecordError(message, reason="empty", hint="leave this record out")


def field(record: JsonObject, key: str, kind: type[T], inside: str = "") -> T:
    """`record[key]`, which has to be of `kind`; `inside` is the path of `record` within the source's record.

    Raises:
        RecordError: it is missing or of another type.
    """
    value = record.get(key)
    if type(value) is kind:
        return value
    path = f"{inside}.{key}" if inside else key
    if key not in record:
        found = "" if inside else f", found the keys {quoted(record)}"
        wrong(f"`{path}` is missing, expected {_EXPECTED[kind]}{found}")
    return typed(value, kind, path)


def typed(value: Any, kind: type[T], path: str) -> T:
    """`value`, found at `path`, which has to be of `kind`.

    Raises:
        RecordError: it is of another type.
    """
    if not isinstance(value, kind):
        wrong(f"`{path}` is {json_type(value)}, expected {_EXPECTED[kind]}")
    return value


def quoted(keys: Any) -> str:
    """Keys in backquotes with commas between, for a message."""
    return ", ".join(f"`{key}`" for key in keys) or "none"


def optional_text(record: JsonObject, key: str) -> str | None:
    """`record[key]`, a string, or None where it is missing, null or blank.

    Raises:
        RecordError: it is of another type.
    """
    value = record.get(key)
    if value is None:
        return None
    text = typed(value, str, key)
    return text if text.strip() else None


def is_blank(text: str | None) -> bool:
    """Whether there is nothing in it but whitespace."""
    return not text or text.isspace()


def tools(record: JsonObject, key: str) -> list[JsonObject] | None:
    """The tools that a chat template may describe to the model: a list, or one written as JSON; None if it is empty.

    Raises:
        RecordError: it is neither, or a tool is no object.
    """
    value = record.get(key)
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            wrong(f"`{key}` is a string that is not JSON ({error}), expected a list")
        if not isinstance(value, list):
            wrong(f"`{key}` is {json_type(value)} written as JSON, expected a list")
    if value is None:
        return None
    return [typed(tool, dict, f"{key}[{index}]") for index, tool in enumerate(typed(value, list, key))] or None
