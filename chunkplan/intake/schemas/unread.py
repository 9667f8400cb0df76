"""Counts the keys of a record that are not read, and refuses those that may hold targets or inputs.

So a user sees it if an answer is under another key. A flag of the whole record is honoured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, NoReturn

import msgspec

from chunkplan.intake.records import Conversation, Exchange, JsonObject, Pair, PromptRecord, Record
from chunkplan.intake.schemas.fields import (
    column_flags,
    ignoring,
    is_blank,
    messages_in,
    quoted,
    refuse_unread,
    shortened,
    typed,
    unsupported,
    without_ignored,
    words_of,
)
from chunkplan.intake.schemas.keys import ANSWERS, FLAGS, SYSTEM, is_number, kind_of, may_mark
from chunkplan.intake.schemas.messages import MEDIA, unread_of_turn, with_flags_of_record
from chunkplan.intake.schemas.rollouts import LEARNT
from chunkplan.intake.schemas.table import GROUPS, SCHEMAS, RecordLayout, Schema, is_label, system_key
from chunkplan.intake.schemas.tokens import IGNORED, OF_TOKENS

#: Schemas of messages, and of a question and its answer.
_MESSAGES, _PAIRS = (*GROUPS[0], *GROUPS[1]), GROUPS[2]

#: The key of the variables that a record gives the chat template, as TRL names it.
KWARGS = "chat_template_kwargs"

#: The most characters of a key that are listed.
_LONGEST = 100


def count_unread(layout: RecordLayout, records: Iterable[JsonObject]) -> Counter[str]:
    """Count the parsed `records` in which a key has a value that is not read; null is none.

    A key within the messages of a list is named `conversations[].key`.
    """
    schema, columns = SCHEMAS[layout.schema], layout.columns
    surely = schema.required if schema.reads else columns.keys() - {"label"}
    always_read = {columns[role] for role in surely}.union(MEDIA)  # media there are none
    perhaps_read = schema.all_keys(columns) - always_read
    lists = {role: columns[role] for role in (*schema.required, "prompt") if role in columns}
    are_messages = not lists.keys().isdisjoint(_MESSAGES)
    counts: dict[str, int] = {}
    for record in records:
        found: set[str] = set()
        ignored = {
            key
            for key in layout.ignored
            if without_ignored(record, (key,)) != record and record.get(key, "") is not None
        }
        record = layout.as_read(record)
        if not always_read.issuperset(record):
            found = {key for key in record.keys() - always_read if record[key] is not None}
            if not found.isdisjoint(perhaps_read):
                found = {key for key in record.keys() - set(MEDIA) if record[key] is not None}
                if schema.reads:
                    found -= {*(columns[role] for role in schema.required), *schema.reads(record, columns)}
                else:
                    found -= {*_read_keys(schema, columns, record).values()}
            if not FLAGS.isdisjoint(found) and layout.schema not in (*OF_TOKENS, "length"):
                found -= {key for key in FLAGS & found if type(record[key]) is not str or key == "mask"}
            if layout.schema in (*_MESSAGES, *_PAIRS):
                found.discard(KWARGS)
        for role, key in lists.items():
            if key not in record:
                key = schema.keys_of(record, columns)[role]
            if role not in schema.required and type(record.get(key)) is not list:
                continue
            values = record.get(key)
            if type(values) is str and are_messages:
                values = messages_in(record, key)
            if type(values) is list and values and type(values[0]) is dict:
                for turn in values:
                    if len(turn) > 2:
                        found.update(f"{key}[].{inner}" for inner in unread_of_turn(turn))
        for key in {named(key) for key in found | ignored}:  # keys that begin alike are one
            counts[key] = counts.get(key, 0) + 1
    return Counter(counts)


def named(key: str) -> str:
    """The name of a key in lists: long ones are cut."""
    return shortened(key, _LONGEST)


def _read_keys(schema: Schema, columns: dict[str, str], record: JsonObject) -> dict[str, str]:
    """The keys that `record` itself has for its roles: role -> key."""
    keys = schema.keys_of(record, columns)
    if "system" in keys:
        keys["system"] = system_key(record, columns)
    if "label" in keys and not is_label(record.get(keys["label"]), keys["label"]):
        del keys["label"]
    return keys


def is_looked_at(key: str, schema: str) -> bool:
    """Return whether a value under a key without a role may change a record, or have it refused."""
    if schema not in (*_MESSAGES, *_PAIRS, "text"):
        return False
    if key in LEARNT:
        return True
    kind = kind_of(key)
    if kind in ("mark", "about"):
        return kind == "mark" or may_mark(key) or key == "labels"
    if schema == "text":
        return not ANSWERS.isdisjoint(words_of(key)[-1:])
    return schema in _PAIRS or kind in ("variable", "thought", "given")


def check_unread(layout: RecordLayout, record: JsonObject, parsed: Record) -> Record:
    """Apply the flags of a record, and refuse unread keys that may hold targets or inputs.

    Beside a question and its answer that is any text of more than one word, unless it is about the record by its name,
    or repeats a text that is read; beside messages only keys with such names.
    """
    schema, read = layout.schema, layout.keys
    others = [key for key in record if key not in read and is_looked_at(key, schema) and record[key] is not None]
    if KWARGS in others:
        parsed = _with_variables(parsed, record[KWARGS])
        others.remove(KWARGS)
    if not FLAGS.isdisjoint(others):
        parsed = with_flags_of_record(parsed, record, read)
        others = [key for key in others if key not in FLAGS or (type(record[key]) is str and key != "mask")]
    found = [key for key in others if _may_matter(key, record[key], schema)]
    if found:
        roles = _read_keys(SCHEMAS[schema], layout.columns, record)
        found = [key for key in found if key not in roles.values() and not _is_repeated(key, schema, roles, record)]
        if found:
            _refuse(found, schema, roles, record)
    return parsed


def _with_variables(parsed: Record, value: Any) -> Record:
    """Add the variables that a record has for the chat template to what it became, which has to be messages."""
    if type(value) is str:
        with suppress(ValueError, RecursionError):
            value = msgspec.json.decode(value)
    variables = typed(value, dict, KWARGS)
    if isinstance(parsed, Pair):
        sides = (_with_variables(side, value) for side in (parsed.chosen, parsed.rejected))
        return Pair(*(side for side in sides if isinstance(side, (PromptRecord, Exchange, Conversation))))
    if variables and not isinstance(parsed, (Conversation, Exchange)):
        unsupported(
            f"`{KWARGS}` beside a prompt that is a string, which no chat template renders",
            "write the record as `messages`",
        )
    return replace(parsed, variables=variables or None) if isinstance(parsed, (Conversation, Exchange)) else parsed


def _may_matter(key: str, value: Any, schema: str) -> bool:
    """Return whether an unread value of such a key may say what is learnt, or what the model is given."""
    kind = kind_of(key)
    if _is_mark(key, value):
        return True
    if kind == "variable" or key in LEARNT:
        return value not in ([], {}, "")
    is_named = schema in _PAIRS and kind not in ("mark", "other")
    return kind != "about" and any(is_named or _are_words(text) for text in _texts(value))


def _is_mark(key: str, value: Any) -> bool:
    """Return whether a value is numbers that may say what counts, or labels of tokens some of which do not."""
    return (type(value) is list and IGNORED in value) or (may_mark(key) and _has_numbers(value))


def _has_numbers(value: Any) -> bool:
    return any(map(is_number, value if type(value) is list else [value]))


def _texts(value: Any) -> Iterator[str]:
    """The strings in a value that are not blank, those in lists and objects too."""
    if type(value) is str and not is_blank(value):
        yield value
    elif type(value) in (list, dict):
        for inner in value if type(value) is list else value.values():
            yield from _texts(inner)


def _are_words(text: str) -> bool:
    """Return whether a text has several words, or letters of a script without spaces; a time has none."""
    if len(text.split(maxsplit=1)) < 2 and not any(letter > "\u0dff" for letter in text):
        return False
    with suppress(ValueError):
        datetime.fromisoformat(text.strip())
        return False
    return True


def _is_repeated(key: str, schema: str, roles: Mapping[str, str], record: JsonObject) -> bool:
    """Return whether what is read says all that `record[key]` does: same-named keys, the question or the answer."""
    kind, required = kind_of(key), [roles[role] for role in SCHEMAS[schema].required]
    if kind in ("variable", "about") or key in LEARNT or (kind == "mark" and _has_numbers(record[key])):
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
    if marks := [key for key in found if _is_mark(key, record[key])]:
        refuse_unread(*marks, says="numbers or truth values, which may say what counts in the loss")
    if learnt := [key for key in found if key in LEARNT]:
        says = "what is learnt of an answer, which only rollouts of tokens have"
        refuse_unread(*learnt, says=says, ways="give `prompt_ids` and `completion_ids` in place of texts; ")
    if variables := [key for key in found if kind_of(key) == "variable"]:
        ways = f"put it into `{KWARGS}` of the record, or say it of all with --template-kwargs; "
        refuse_unread(*variables, says="what chat templates may ask for", ways=ways)
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
    if type(record[key]) is not str:
        return None
    if schema == "text":
        return f"{column_flags({'prompt': roles['text'], 'completion': key})} reads both"
    if kind_of(key) not in ("given", "asked"):
        return None
    required = [roles[role] for role in SCHEMAS[schema].required]
    is_text = type(record[required[0]]) is str
    if not SYSTEM.isdisjoint(words_of(key)):
        # Beside a prompt that is a text no system is read.
        columns = {"question": required[0], "answer": required[1]} if schema == "prompt+completion" and is_text else {}
        return None if roles["system"] in record else f"{column_flags({'system': key, **columns})} reads it"
    if schema not in _PAIRS or record.get(roles.get("input", "")) or not is_text:
        return None
    columns = {"instruction": required[0], "input": key, "output": required[1]}
    return f"{column_flags({role: one for role, one in columns.items() if role != one})} reads it too"
