"""What a record has beside that which is read, where it may say what is learnt, or what the model is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

from chunkplan.intake.records import JsonObject, Record
from chunkplan.intake.schemas.fields import is_blank, quoted, unsupported, words_of
from chunkplan.intake.schemas.flags import column_flags, line_of
from chunkplan.intake.schemas.key_kinds import ANSWERS, SYSTEM, Kind, is_number, kind_of, may_mark
from chunkplan.intake.schemas.layout import RecordLayout
from chunkplan.intake.schemas.loss_flags import FLAGS, with_flags_of_record
from chunkplan.intake.schemas.marks import ignoring, refuse_unread
from chunkplan.intake.schemas.registry import GROUPS, SCHEMAS
from chunkplan.intake.schemas.token_marks import IGNORED
from chunkplan.intake.schemas.unread import read_keys

#: Schemas of messages, and of a question and its answer.
_MESSAGES, _PAIRS = GROUPS[:2]


def is_looked_at(key: str, schema: str) -> bool:
    """Whether a value under a key that no role has may change what becomes of a record, or have it refused."""
    if schema not in (*_MESSAGES, *_PAIRS, "text"):
        return False
    kind = kind_of(key)
    if kind in ("mark", "about"):
        return kind == "mark" or may_mark(key) or key == "labels"
    if schema == "text":
        return not ANSWERS.isdisjoint(words_of(key)[-1:])
    return schema in _PAIRS or kind in ("variable", "thought", "given")


def with_left_over(layout: RecordLayout, record: JsonObject, parsed: Record) -> Record:
    """`parsed`, as what else `record` has says of it.

    Beside a question and its answer any text of more than one word may be given to the model, unless its name says that
    it is about the record, or what is read says the same. Beside messages it is what has a name for that.

    Raises:
        RecordError: a flag makes no sense, or leaves nothing to train on; or a key that nothing reads may say what is
            learnt, or what the model is given.
    """
    schema, read = layout.schema, layout.keys
    others = [key for key in record if key not in read and is_looked_at(key, schema) and record[key] is not None]
    if not others:
        return parsed
    if not FLAGS.isdisjoint(others):
        parsed = with_flags_of_record(parsed, record, read)
        others = [key for key in others if key not in FLAGS or (type(record[key]) is str and key != "mask")]
    found = [
        key
        for key in others
        if (may_mark(key) and _has_numbers(record[key])) or _may_say(record[key], kind_of(key), schema)
    ]
    if found:
        roles = read_keys(SCHEMAS[schema], layout.columns, record)
        found = [key for key in found if key not in roles.values() and not _is_repeated(key, schema, roles, record)]
    if found:
        _refuse(found, schema, roles, record)
    return parsed


def _may_say(value: Any, kind: Kind, schema: str) -> bool:
    """Whether an unread value of such a key may say what is learnt, or what the model is given."""
    if _marks_tokens(value):
        return True
    if kind == "variable":
        return value not in ([], {}, "")
    is_named = schema in _PAIRS and kind not in ("mark", "other")
    return kind != "about" and any(is_named or _are_words(text) for text in _texts(value))


def _marks_tokens(value: Any) -> bool:
    """Whether a value is labels of tokens, some of which do not count."""
    return type(value) is list and IGNORED in value


def _has_numbers(value: Any) -> bool:
    return any(map(is_number, value if type(value) is list else [value]))


def _texts(value: Any) -> Iterator[str]:
    """The strings in a value that are not blank, those in lists and objects too."""
    if type(value) is str:
        if not is_blank(value):
            yield value
    elif type(value) in (list, dict):
        for inner in value if type(value) is list else value.values():
            yield from _texts(inner)


def _are_words(text: str) -> bool:
    """Whether a text has more than one word, or a letter of a script without spaces between words; a time has none."""
    if len(text.split(maxsplit=1)) < 2 and not any(letter > "\u0dff" for letter in text):
        return False
    with suppress(ValueError):
        datetime.fromisoformat(text.strip())
        return False
    return True


def _is_repeated(key: str, schema: str, roles: Mapping[str, str], record: JsonObject) -> bool:
    """Whether what is read says all that `record[key]` does: what has the name of it, the question or the answer."""
    kind, required = kind_of(key), [roles[role] for role in SCHEMAS[schema].required]
    if kind in ("variable", "about") or (kind == "mark" and _has_numbers(record[key])):
        return False
    if kind in ("mark", "other"):
        read = [text.strip() for one in roles.values() for text in _texts(record.get(one))]
        return all(
            any(text.strip() in one for one in read) or all(one in text for one in read) for text in _texts(record[key])
        )
    places = required[-1:] if kind == "thought" else [required[0], roles["system"]]
    said = f" {' '.join(' '.join(_texts([record.get(one) for one in places])).split())} "
    return all(f" {' '.join(text.split())} " in said for text in _texts(record[key]))


def _refuse(found: list[str], schema: str, roles: Mapping[str, str], record: JsonObject) -> NoReturn:
    if marks := [key for key in found if _marks_tokens(record[key]) or (may_mark(key) and _has_numbers(record[key]))]:
        refuse_unread(*marks, says="numbers or truth values, which may say what counts in the loss")
    if variables := [key for key in found if kind_of(key) == "variable"]:
        refuse_unread(*variables, says="what chat templates may ask for: they get messages and tools alone")
    way = _way_on(found[0], schema, roles, record) if len(found) == 1 else None
    if way is None and "thought" in map(kind_of, found):
        way = "write what was thought as the `reasoning_content` of an answer in `messages`"
    what = {"text": "the text"}.get(schema, "the messages" if schema in _MESSAGES else "a question and its answer")
    them = "it" if len(found) == 1 else "them"
    unsupported(
        f"{quoted(found)} beside {what}: the model may be given {them}, and nothing reads {them}",
        hint=f"{way or f'put {them} into what is read'}; if it does not matter here: {ignoring(*found)}",
    )


def _way_on(key: str, schema: str, roles: Mapping[str, str], record: JsonObject) -> str | None:
    """The options with which `key` is read as well, if there are some."""
    if schema == "text":
        columns = {"prompt": roles["text"], "completion": key}
        return f"{line_of(column_flags(columns))} reads both" if type(record[key]) is str else None
    if type(record[key]) is not str or kind_of(key) not in ("given", "asked"):
        return None
    required = [roles[role] for role in SCHEMAS[schema].required]
    is_text = schema == "prompt+completion" and type(record[required[0]]) is str  # beside which no system is read
    if not SYSTEM.isdisjoint(words_of(key)):
        columns = {"system": key} | (dict(zip(("question", "answer"), required, strict=True)) if is_text else {})
        return None if roles["system"] in record else f"{line_of(column_flags(columns))} reads it"
    if schema not in _PAIRS or record.get(roles.get("input", "")) or type(record[required[0]]) is not str:
        return None
    columns = {"instruction": required[0], "input": key, "output": required[1]}
    return f"{line_of(column_flags({role: one for role, one in columns.items() if role != one}))} reads it too"
