"""Checked values of records, and errors and hints that name the user's own keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NoReturn, TypeVar

import msgspec

from chunkplan.errors import DataError
from chunkplan.intake.records import JsonObject, RecordError

T = TypeVar("T", bool, str, list[Any], JsonObject)

HINT = "fix this record, or leave it out"

#: Words of a hint before flags to paste, and before flags to choose one of.
TRY, CHOOSE = "try this: ", "say which: "

#: Pattern of a key of the objects in a list, as users and screens write it: messages[].weight.
OF_EACH = "[]."

#: The most keys that a message lists, and the most characters of each.
MOST_LISTED, _LONGEST = 10, 60

#: A flag in a hint that is for all sources, and the first word of its value, as it is typed.
_FLAG = re.compile(
    r"(--column |--ignore-column |--format (?=[\w+]+(?:[ ,;]|$)))('[^']*'|[\w@%+=:,./-]*[\w@%+=:/-])", re.ASCII
)

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


class LayoutError(DataError):
    """Nobody knows how a source is laid out; `missing` are roles whose keys the user named and no record has."""

    def __init__(self, message: str, *, hint: str, where: str | None = None, missing: Sequence[str] = ()) -> None:
        super().__init__(message, where=where, hint=hint)
        self.missing = tuple(missing)

    @property
    def line(self) -> str:
        """The flags to be pasted, all together, for the source to be read; "" where they are not known."""
        return self.hint.partition(TRY)[2]

    @property
    def is_definite(self) -> bool:
        """Return whether the hint has flags that work as they are: to be pasted, or to choose from."""
        return TRY in self.hint or CHOOSE in self.hint


def column_flags(keys: Mapping[str, str]) -> str:
    """The options that name the keys of these roles, as they are typed."""
    return " ".join(f"--column {shlex.quote(f'{role}={key}')}" for role, key in keys.items())


def ignoring(*keys: str) -> str:
    """The options that ignore `keys`; paths such as `messages[3].weight` stand for all messages."""
    names = dict.fromkeys(re.sub(r"\[[0-9]+\]", "[]", key) for key in keys)
    return " ".join(f"--ignore-column {shlex.quote(name)}" for name in names)


def hint_of_source(hint: str, source: str | None) -> str:
    """`hint`, whose flags of all sources are for those that `source` names."""

    def of_source(found: re.Match[str]) -> str:
        flag, value = found[1], found[2].strip("'")
        sign = "=" if flag == "--format " else ":"
        return flag + shlex.quote(f"{source}{sign}{value}")

    return hint if source is None else _FLAG.sub(of_source, hint)


def wrong(message: str, hint: str = HINT) -> NoReturn:
    """Raise RecordError: keys or types are not those of the schema."""
    raise RecordError(message, reason="schema", hint=hint)


def unsupported(message: str, hint: str = HINT) -> NoReturn:
    """Raise RecordError: this is not planned."""
    raise RecordError(message, reason="unsupported", hint=hint)


def empty(message: str) -> NoReturn:
    """Raise RecordError: there is nothing to train on."""
    raise RecordError(message, reason="empty", hint="leave this record out")


def refuse_unread(*keys: str, says: str, ways: str = "") -> NoReturn:
    """Raise RecordError for unread `keys` that may say what is learnt; `ways` are hints besides ignoring them."""
    hint = f"{ways}if it does not matter here: {ignoring(*keys)}"
    unsupported(f"`{shortened(keys[0])}` is not read, and has {says}", hint)


def refuse_contradiction(key: str, other: str, what: str) -> NoReturn:
    """Raise RecordError for two keys that say different things of `what`."""
    wrong(f"`{key}` and `{other}` contradict each other: {what}", f"{CHOOSE}{ignoring(other)}, or {ignoring(key)}")


def json_type(value: object) -> str:
    """The JSON name of a value's type, with its article; values of tables may be of other types."""
    return _TYPES.get(type(value), f"a {type(value).__name__}")


def field(record: JsonObject, key: str, kind: type[T], inside: str = "") -> T:
    """Return `record[key]`; raises RecordError where it is missing or not of `kind`. `inside` is its path."""
    value = record.get(key)
    if type(value) is kind:
        return value
    path = f"{inside}.{key}" if inside else key
    if key not in record:
        found = "" if inside else f", found the keys {quoted(record)}"
        wrong(f"`{path}` is missing, expected {_EXPECTED[kind]}{found}")
    return typed(value, kind, path)


def typed(value: Any, kind: type[T], path: str, hint: str = HINT) -> T:
    """`value`, found at `path`; raises RecordError where it is not of `kind`."""
    if not isinstance(value, kind):
        wrong(f"`{path}` is {json_type(value)}, expected {_EXPECTED[kind]}", hint)
    return value


def optional_text(record: JsonObject, key: str) -> str | None:
    """`record[key]`, or None where it is missing, null or blank; raises RecordError where it is no string."""
    value = record.get(key)
    return None if value is None or is_blank(typed(value, str, key)) else value


def messages_in(record: JsonObject, key: str) -> list[Any]:
    """Return the list in `record[key]`, or the one written there as JSON; raises RecordError for anything else."""
    value = record.get(key)
    if type(value) is not str:
        return field(record, key, list)
    try:
        value = msgspec.json.decode(value)
    except (ValueError, RecursionError) as error:
        wrong(f"`{key}` is a string, expected a list, or one written as JSON ({error})")
    return value if type(value) is list else wrong(f"`{key}` is {json_type(value)} written as JSON, expected a list")


def objects(value: Any, path: str, *, or_one: bool = False) -> list[JsonObject]:
    """The objects of a list found at `path`, which may be written as JSON, null or blank; or of one alone."""
    if isinstance(value, str) and value.strip():
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            wrong(f"`{path}` is a string that is not JSON ({error}), expected a list")
        if not isinstance(value, (list, type(None))) and not (or_one and isinstance(value, dict)):
            wrong(f"`{path}` is {json_type(value)} written as JSON, expected a list")
    if value is None or isinstance(value, str):
        return []
    if or_one and isinstance(value, dict):
        return [value] if value else []
    return [typed(entry, dict, f"{path}[{index}]") for index, entry in enumerate(typed(value, list, path))]


def without_ignored(record: JsonObject, ignored: tuple[str, ...]) -> JsonObject:
    """`record` without the keys `ignored`; `messages[].weight` is one of the objects in the list `messages`."""
    if not ignored:
        return record
    kept = {key: value for key, value in record.items() if key not in ignored}
    for path in ignored:
        key, _, inner = path.partition(OF_EACH)
        if inner and isinstance(kept.get(key), (list, str)):
            with suppress(RecordError):  # of a string that is no list, which is refused where it is read
                kept[key] = [
                    {name: one for name, one in value.items() if name != inner} if isinstance(value, dict) else value
                    for value in messages_in(kept, key)
                ]
    return kept


def quoted(keys: Collection[str]) -> str:
    """Keys in backquotes with commas between, for a message: as many, and as much of each, as a screen has room for."""
    return listed([f"`{shortened(key)}`" for key in islice(keys, MOST_LISTED)], len(keys)) or "none"


def listed(words: Sequence[str], number: int) -> str:
    """`words` with commas between, which are the first of `number`: "a, b and 298 more"."""
    rest = number - len(words)
    return ", ".join(words) + (f" and {rest:,} more" if rest else "")


def shortened(text: str, longest: int = _LONGEST) -> str:
    """A key or a role from data, for a message: long ones are cut."""
    return text if len(text) <= longest else f"{text[:longest]}..."


def words_of(key: str) -> list[str]:
    """The words in the name of a key, in lower case and without the s of a plural: `InstructionTexts`, `my-text`."""
    apart = re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", key).lower())
    return [word if word in ("ids", "sys") else word.removesuffix("s") or word for word in apart]


def is_blank(text: str | None) -> bool:
    """Return whether a text has nothing in it but whitespace."""
    return not text or text.isspace()
