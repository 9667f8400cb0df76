"""What the schemas share: values of a record, checked, with errors that name the user's own key."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any, NoReturn, TypeVar

import msgspec

from chunkplan.intake.records import JsonObject, as_tools
from chunkplan.intake.rejection import RecordError

T = TypeVar("T", bool, str, list[Any], JsonObject)

HINT = "fix this record, or leave it out"

#: The most keys that a message lists, and the most characters of each.
MOST_LISTED = 10
_LONGEST = 60

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


def typed(value: Any, kind: type[T], path: str, hint: str = HINT) -> T:
    """`value`, found at `path`, which has to be of `kind`.

    Raises:
        RecordError: it is of another type.
    """
    if not isinstance(value, kind):
        wrong(f"`{path}` is {json_type(value)}, expected {_EXPECTED[kind]}", hint)
    return value


def quoted(keys: Collection[str]) -> str:
    """Keys in backquotes with commas between, for a message: as many, and as much of each, as a screen has room for."""
    return listed([f"`{shortened(key)}`" for key in islice(keys, MOST_LISTED)], len(keys)) or "none"


def listed(words: Sequence[str], number: int) -> str:
    """`words` with commas between, which are the first of `number`: "a, b and 298 more"."""
    rest = number - len(words)
    return ", ".join(words) + (f" and {rest:,} more" if rest else "")


def shortened(text: str) -> str:
    """A key or a role from data, for a message: long ones are cut."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def words_of(key: str) -> list[str]:
    """The words in the name of a key, in lower case and without the s of a plural: `InstructionTexts`, `my-text`."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", key).lower()
    return [
        word if word in ("ids", "sys") else word.removesuffix("s") or word for word in re.findall(r"[^\W\d_]+", apart)
    ]


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


def messages_in(record: JsonObject, key: str) -> list[Any]:
    """The list in `record[key]`, or the one that is written there as JSON.

    Raises:
        RecordError: it is missing, or neither.
    """
    value = record.get(key)
    if type(value) is str:
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            wrong(f"`{key}` is a string, expected a list, or one written as JSON ({error})")
        if type(value) is not list:
            wrong(f"`{key}` is {json_type(value)} written as JSON, expected a list")
        return value
    return field(record, key, list)


def tools(record: JsonObject, columns: dict[str, str]) -> list[JsonObject] | None:
    """The tools that a chat template may describe to the model: `tools`, or `functions` as OpenAI had them before.

    Each is a list, or one written as JSON. None if there are none.

    Raises:
        RecordError: they are something else, a tool is no object, or both are there.
    """
    key, functions_key = columns["tools"], columns["functions"]
    found, functions = objects(record.get(key), key), objects(record.get(functions_key), functions_key)
    if any("functionDeclarations" in tool for tool in found):
        unsupported(f"`{key}` has `functionDeclarations` of Gemini, which no chat template reads")
    if not functions:
        return found or None
    if found:
        wrong(f"`{key}` and `{functions_key}` are both there", hint="leave one of the two out")
    return as_tools(functions)


def objects(value: Any, path: str, *, or_one: bool = False) -> list[JsonObject]:
    """The objects of a list found at `path`, which may be written as JSON, null or blank; or of one alone."""
    if isinstance(value, str):
        if not value.strip():
            return []
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            wrong(f"`{path}` is a string that is not JSON ({error}), expected a list")
        if not isinstance(value, (list, type(None))) and not (or_one and isinstance(value, dict)):
            wrong(f"`{path}` is {json_type(value)} written as JSON, expected a list")
    if value is None:
        return []
    if or_one and isinstance(value, dict):
        return [value] if value else []
    return [typed(entry, dict, f"{path}[{index}]") for index, entry in enumerate(typed(value, list, path))]
