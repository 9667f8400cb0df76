"""What to type where no schema fits: the `--column` line that reads the records, from the keys that they have.

A line is only suggested if most of the records can be read with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from chunkplan.errors import DataError
from chunkplan.intake.records import JsonObject
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.schemas.fields import messages_in
from chunkplan.intake.schemas.message_list import exchange_of
from chunkplan.intake.schemas.readings import choose_reading, column_flags
from chunkplan.intake.schemas.registry import SCHEMAS

#: Words in the names of keys, and what has such names.
_ASKS = {"instruction", "question", "prompt", "query", "problem", "input", "user", "human", "request"}
_ANSWERS = {
    *("answer", "response", "output", "completion", "solution", "reply", "generation"),
    *("assistant", "target", "gpt", "bot"),
}
_TEXTS = {"text", "content", "body", "document", "doc", "article", "passage", "story"}
_TOKENS, _LENGTHS, _SYSTEM = {"token", "id", "ids"}, {"length", "len", "token"}, {"system"}

#: What has one of these in its name says something about a text.
_ABOUT = {
    *("id", "ids", "type", "source", "lang", "language", "category", "name", "url", "date", "time", "length", "len"),
    *("num", "number", "count", "index", "hash", "score", "path", "title", "format", "rejected"),
}

#: Words that say that a key is something else.
_BARRED = {"ask": _ABOUT | _SYSTEM, "answer": _ABOUT | _SYSTEM, "text": _ABOUT | _ASKS | _ANSWERS | _SYSTEM}

#: What a suggested line begins with.
TRY = "try this: "

#: Longer keys are not suggested: nobody pastes them.
_LONGEST = 100

#: What each schema that can be suggested needs: role -> which keys may have it. The first that works is suggested.
_NEEDS: tuple[tuple[str, dict[str, str]], ...] = (
    ("messages", {"messages": "messages"}),
    ("conversations", {"conversations": "messages"}),
    ("question+answer", {"system": "system", "question": "ask", "answer": "answer"}),
    ("prompt+completion", {"prompt": "ask", "completion": "answer"}),
    ("question+answer", {"question": "ask", "answer": "answer"}),
    ("instruction", {"instruction": "ask", "output": "answer"}),
    ("text", {"text": "text"}),
    ("input_ids", {"input_ids": "tokens"}),
    ("length", {"length": "length"}),
)


def suggest(records: Sequence[JsonObject], names: Sequence[str], named: Mapping[str, str]) -> str | None:
    """What to do to have `records` read by one of the schemas `names`, or None where there is nothing good to say.

    It ends with a line to be pasted, which repeats the keys that the user has `named`.
    """
    if not named and all("role" in record and "content" in record for record in records):
        return "a record is one message: write all messages of a conversation as one record with `messages`"
    found = {kind: _only(records, named, kind, *how) for kind, how in _KINDS.items()}
    for name, needs in _NEEDS:
        columns = {**named, **{role: named.get(role) or found[kind] for role, kind in needs.items()}}
        if name in names and columns.keys() <= SCHEMAS[name].roles.keys() and all(columns.values()):
            keys = {role: key for role, key in columns.items() if key is not None}
            if _can_be_read(records, name, keys):
                return f"{TRY}{column_flags(keys)}"
    for key, value in records[0].items() if len(records) == 1 else ():
        if type(value) is list and value and type(value[0]) is dict and _is_plain(key):
            return f"`{key}` is a list of {len(value):,} objects: write these as the records"
    return None


def _only(
    records: Sequence[JsonObject],
    named: Mapping[str, str],
    kind: str,
    words: set[str],
    is_value: Callable[[Any], bool],
) -> str | None:
    """The key with one of `words` in its name that has such values, if one is closest: has fewest other words.

    Of messages, and of texts where no name says that they are, it is the only key that has some.
    """
    keys = [key for key in dict.fromkeys(key for record in records for key in record) if _is_plain(key)]
    fitting = [key for key in keys if key not in named.values() and _mostly(records, key, is_value)]
    barred = _BARRED.get(kind, set())
    fitting = [key for key in fitting if barred.isdisjoint(_words(key))]
    distances = {key: len(_words(key)) for key in fitting if words.intersection(_words(key))}
    closest = [key for key, distance in distances.items() if distance == min(distances.values())]
    if kind == "text":
        several = [key for key in fitting if any(" " in str(record.get(key)).strip() for record in records)]
        closest = several if not distances or not {*several} <= {*closest} else closest
    if kind == "messages":
        closest = fitting
    return closest[0] if len(closest) == 1 else None


def _is_plain(key: str) -> bool:
    return bool(key) and key.isprintable() and len(key) <= _LONGEST


def _words(key: str) -> list[str]:
    """The words in the name of a key, in lower case and without the s of a plural: `InstructionTexts`, `my-text`."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", key).lower()
    return [word if word == "ids" else word.removesuffix("s") or word for word in re.findall(r"[^\W\d_]+", apart)]


def _mostly(records: Sequence[JsonObject], key: str, is_value: Callable[[Any], bool]) -> bool:
    """Whether half of the records, or more, have such a value."""
    return 2 * sum(is_value(record.get(key)) for record in records) >= len(records)


def _are_messages(value: Any) -> bool:
    if type(value) is str:
        with suppress(RecordError):
            value = messages_in({"": value}, "")
    if type(value) is not list or not value or type(value[0]) is not dict:
        return False
    return bool({"role", "from"} & value[0].keys()) or exchange_of(value[0]) is not None


def _is_said(value: Any) -> bool:
    """Whether it may be what somebody asked or answered."""
    return (type(value) is str and bool(value.strip())) or _are_messages(value)


def _are_tokens(value: Any) -> bool:
    return type(value) is list and bool(value) and set(map(type, value)) == {int}


#: Which keys may have what is needed: words in their names, and what their values are.
_KINDS: dict[str, tuple[set[str], Callable[[Any], bool]]] = {
    "messages": (set(), _are_messages),
    "ask": (_ASKS, _is_said),
    "answer": (_ANSWERS, _is_said),
    "system": (_SYSTEM, lambda value: type(value) is str and bool(value.strip())),
    "text": (_TEXTS, lambda value: type(value) is str and bool(value.strip())),
    "tokens": (_TOKENS, _are_tokens),
    "length": (_LENGTHS, lambda value: type(value) is int and value > 0),
}


def _can_be_read(records: Sequence[JsonObject], name: str, columns: dict[str, str]) -> bool:
    """Whether half of the records, or more, become something by the schema `name` with these keys."""
    schema, num_read = SCHEMAS[name], 0
    names = [other for other in SCHEMAS if columns.keys() <= SCHEMAS[other].roles.keys()]
    for record in records:
        with suppress(DataError, RecursionError):
            reading = choose_reading(record, names, columns, is_chosen=False)
            if reading is not None and reading.schema == name:
                usual = {role: keys[0] for role, keys in schema.roles.items()}
                schema.parse(record, {**usual, **columns, **reading.keys})
                num_read += 1
    return 2 * num_read >= len(records) > 0
