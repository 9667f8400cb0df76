"""Which keys of a record hold content, which is trained or said to the model: all but those that say what it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chunkplan.intake.records import JsonObject
from chunkplan.intake.schemas.fields import words_of

#: The last word of names of keys that say something about a record, whatever is in them.
_ABOUT = {
    *("id", "ids", "idx", "index", "uuid", "guid", "uid", "hash", "sha", "md", "digest", "checksum", "url", "uri"),
    *("date", "time", "timestamp", "datetime", "at", "year"),
}

#: Those that do where what is in them is a number or one word, and those that do where it is a number.
_IN_A_WORD = {
    *(
        "source",
        "name",
        "lang",
        "language",
        "model",
        "author",
        "domain",
        "dataset",
        "subset",
        "split",
        "origin",
        "seed",
    ),
    *("meta", "metadata", "link", "path", "file", "filename", "version", "license", "licence"),
}
_IN_A_NUMBER = {"num", "number", "count", "length", "len", "token", "size", "byte"}

#: The first word of a name of a number that counts something.
_COUNTS = {"n", "num"}


def keys_of_content(records: Iterable[JsonObject]) -> list[str]:
    """The keys under which one of `records` has content, in their order."""
    return list(dict.fromkeys(key for record in records for key, value in record.items() if holds_content(key, value)))


def holds_content(key: str, value: Any) -> bool:
    """Whether `value`, found under `key`, may be trained or said to the model, or says what of that is."""
    if isinstance(value, dict):
        return any(holds_content(inner, one) for inner, one in value.items())
    if isinstance(value, (list, tuple)):
        are_numbers = any(isinstance(one, (bool, int, float)) for one in value)  # of each token, perhaps
        return are_numbers or any(holds_content(key, one) for one in value)
    words = words_of(key)
    if isinstance(value, str):
        about = _ABOUT if len(value.split()) > 1 else _ABOUT | _IN_A_WORD
        return bool(value.strip()) and about.isdisjoint(words[-1:])
    about = _ABOUT | _IN_A_WORD | _IN_A_NUMBER
    return value is not None and about.isdisjoint(words[-1:]) and _COUNTS.isdisjoint(words[:1])
