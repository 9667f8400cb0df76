"""Data's own marks: a key that says what is learnt, or what the model is given, is honoured or stops the run.

A key that is not known may be one. Where its values look like it, the record is refused, unless the user says that the
key is to be ignored.
"""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from typing import NoReturn

from chunkplan.intake.records import JsonObject
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.schemas.fields import messages_in, shortened, unsupported, wrong
from chunkplan.intake.schemas.flags import CHOOSE

#: How a key of the objects in a list is named, in screens and by the user: messages[].weight.
OF_EACH = "[]."

_COLUMN, _IGNORE = "--column ", "--ignore-column "


def refuse_unread(*keys: str, says: str, ways: str = "") -> NoReturn:
    """Raises RecordError for the first of some keys, such as `weight` or `messages[].weight`, that nothing reads.

    `says` are words for what is in it and what that may mean: "a number for each token, which may say what counts".
    `ways` are other ways on than to ignore it, for the hint.
    """
    unsupported(
        f"`{shortened(keys[0])}` is not read, and has {says}",
        hint=f"{ways}if it does not matter here: {ignoring(*keys)}",
    )


def refuse_contradiction(key: str, other: str, what: str) -> NoReturn:
    """Raises RecordError for two keys that say different things of `what`."""
    wrong(f"`{key}` and `{other}` contradict each other: {what}", hint=f"{CHOOSE}{ignoring(other)}, or {ignoring(key)}")


def ignoring(*keys: str) -> str:
    """What to type for `keys` to be ignored, which may be paths such as `messages[3].weight`: of all messages, then."""
    names = dict.fromkeys(re.sub(r"\[[0-9]+\]", "[]", key) for key in keys)
    return " ".join(f"{_IGNORE}{shlex.quote(name)}" for name in names)


def hint_of_source(hint: str, source: str | None) -> str:
    """`hint`, whose flags are for the sources that `source` names, or for all."""
    flags = () if source is None else (_COLUMN, _IGNORE)
    for flag in flags:
        hint = hint.replace(flag, f"{flag}{shlex.quote(f'{source}:')}")
    return hint


def without_ignored(record: JsonObject, ignored: tuple[str, ...]) -> JsonObject:
    """`record` without the keys `ignored`; `messages[].weight` is one of the objects in the list `messages`."""
    if not ignored:
        return record
    kept = {key: value for key, value in record.items() if key not in ignored}
    for path in ignored:
        key, _, inner = path.partition(OF_EACH)
        if inner and isinstance(kept.get(key), (list, str)):
            with suppress(RecordError):  # of a string that is no list, which is refused where it is read
                values = messages_in(kept, key)
                kept[key] = [
                    {name: one for name, one in value.items() if name != inner} if isinstance(value, dict) else value
                    for value in values
                ]
    return kept


def ignored_in(record: JsonObject, ignored: tuple[str, ...]) -> set[str]:
    """Which of the keys `ignored` say something in `record`."""
    return {key for key in ignored if without_ignored(record, (key,)) != record and record.get(key, "") is not None}
