"""Where no schema fits: the keys to name so that one reads the records, from those that they have.

Keys are only suggested if most of the records can be read with them, and nothing of their content is left unread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from chunkplan.errors import DataError
from chunkplan.intake.records import Conversation, JsonObject, Message
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.schemas.content import holds_content, keys_of_content
from chunkplan.intake.schemas.fields import messages_in, words_of
from chunkplan.intake.schemas.layout import RecordLayout
from chunkplan.intake.schemas.left_over import with_left_over
from chunkplan.intake.schemas.message_list import exchange_of
from chunkplan.intake.schemas.readings import choose_reading
from chunkplan.intake.schemas.registry import SCHEMAS
from chunkplan.intake.schemas.unread import count_unread

#: Words in the names of keys, and what has such names.
_ASKS = {
    *("instruction", "question", "prompt", "query", "problem", "input", "user", "human", "request"),
    *("q", "inquiry"),
}
_ANSWERS = {
    *("answer", "response", "output", "completion", "solution", "reply", "generation"),
    *("assistant", "target", "gpt", "bot", "a"),
}
_TEXTS = {"text", "content", "body", "document", "doc", "article", "passage", "story"}
_INSTRUCTIONS, _INPUTS = {"instruction"}, {"input", "context"}
_CONTEXT, _RESPONSE, _SOURCE, _TARGET = {"context"}, {"response"}, {"source"}, {"target"}
_TOKENS, _LENGTHS, _SYSTEM = {"token", "id", "ids"}, {"length", "len", "token"}, {"system", "sys"}

#: A text that goes on, with nothing between, has one of the first in its names, and none of the others: these are of
#: somebody who asks and somebody who answers, each of which a chat template marks.
_GOES_ON = {"prompt", "completion", "generation"}
_IS_SAID = {
    *("instruction", "question", "query", "problem", "user", "human", "request", "q", "inquiry"),
    *("answer", "response", "reply", "assistant", "gpt", "bot", "a"),
}

#: What has one of these in its name says something about a text.
_ABOUT = {
    *("id", "ids", "type", "source", "lang", "language", "category", "name", "url", "date", "time", "length", "len"),
    *("num", "number", "count", "index", "hash", "score", "path", "title", "format", "rejected"),
}

#: Words that say that a key is something else.
_BARRED = {
    **dict.fromkeys(("ask", "answer", "instruction", "input"), _ABOUT | _SYSTEM),
    "text": _ABOUT | _ASKS | _ANSWERS | _SYSTEM,
}

#: Of two answers, what is compared with the other has one of these in its name.
_COMPARED = {"expected", "final", "gold", "reference", "correct", "true"}

#: Longer keys are not suggested: nobody pastes them.
_LONGEST = 100

#: What each schema that can be suggested needs: role -> which keys may have it. The first that works is suggested.
_NEEDS: tuple[tuple[str, dict[str, str]], ...] = (
    ("messages", {"messages": "messages"}),
    ("conversations", {"conversations": "messages"}),
    ("instruction", {"instruction": "instruction", "input": "input", "output": "answer"}),
    ("prompt+completion", {"prompt": "begin", "completion": "answer"}),
    ("question+answer", {"question": "ask", "answer": "answer"}),
    ("instruction", {"instruction": "ask", "output": "answer"}),
    ("prompt+completion", {"prompt": "ask", "completion": "answer"}),
    ("question+answer", {"question": "context", "answer": "response"}),
    ("question+answer", {"question": "source", "answer": "target"}),
    ("text", {"text": "text"}),
    ("input_ids", {"input_ids": "tokens"}),
    ("length", {"length": "length"}),
)

#: What may stand beside, in a schema that takes it.
_BESIDE = ("system", "history")


def suggest(
    records: Sequence[JsonObject], names: Sequence[str], named: Mapping[str, str]
) -> tuple[str, dict[str, str]] | None:
    """The schema of `names` that reads `records`, and the keys to name for it, role -> key; None where none is good.

    Those that the user has `named` are among them.
    """
    found = {kind: only_key(records, named, kind) for kind in _KINDS}
    ask, answer = (named.get(role) or found[kind] for role, kind in (("prompt", "ask"), ("completion", "answer")))
    said = {*words_of(ask or ""), *words_of(answer or "")}
    found["begin"] = ask if said & _GOES_ON and not said & _IS_SAID else None
    if any(_ASKS.intersection(words_of(key)) for record in records for key in record):
        found["context"] = found["source"] = None  # something else is asked
    if found["answer"] or (found["ask"] and _TEXTS.isdisjoint(words_of(found["text"] or ""))):
        found["text"] = None  # it may be half of what is trained
    for name, needs in _NEEDS:
        columns = {**named, **{role: named.get(role) or found[kind] for role, kind in needs.items()}}
        if name in names and columns.keys() <= SCHEMAS[name].roles.keys() and all(columns.values()):
            beside = {role: found[role] for role in _BESIDE if found[role] and role in SCHEMAS[name].optional}
            keys = {role: key for role, key in {**beside, **columns}.items() if key is not None}
            if len({*keys.values()}) == len(keys) and can_be_read(records, name, keys):
                return name, keys
    return None


def unread_content(layout: RecordLayout, records: Sequence[JsonObject]) -> list[str]:
    """The keys with content that are not read of `records`, which can be."""
    unread = count_unread(layout, records)
    content = {*keys_of_content(records)}
    return [key for key in unread if key in content or not any(key in record for record in records)]  # of messages


def only_key(records: Sequence[JsonObject], named: Mapping[str, str], kind: str) -> str | None:
    """The key with one of `words` in its name that has such values, if one is closest: has fewest other words.

    Of messages, and of texts where no name says that they are, it is the only key that has some.
    """
    words, is_value = _KINDS[kind]
    keys = [key for key in dict.fromkeys(key for record in records for key in record) if is_plain(key)]
    is_there = _where_said if kind in _BESIDE else _mostly
    fitting = [key for key in keys if key not in named.values() and is_there(records, key, is_value)]
    barred = _BARRED.get(kind, set())
    fitting = [key for key in fitting if barred.isdisjoint(words_of(key))]
    distances = {key: len(words_of(key)) for key in fitting if words.intersection(words_of(key))}
    closest = [key for key, distance in distances.items() if distance == min(distances.values())]
    if kind == "text":
        several = [key for key in fitting if any(" " in str(record.get(key)).strip() for record in records)]
        closest = several if not distances or not {*several} <= {*closest} else closest
    if kind in ("messages", "history"):
        closest = fitting
    if kind == "answer" and len(closest) > 1:
        closest = [key for key in closest if _COMPARED.isdisjoint(words_of(key))]
    return closest[0] if len(closest) == 1 else None


def is_plain(key: str) -> bool:
    """Whether `key` can be shown and pasted."""
    return bool(key) and key.isprintable() and len(key) <= _LONGEST


def _mostly(records: Sequence[JsonObject], key: str, is_value: Callable[[Any], bool]) -> bool:
    """Whether half of the records, or more, have such a value."""
    return 2 * sum(is_value(record.get(key)) for record in records) >= len(records)


def _where_said(records: Sequence[JsonObject], key: str, is_value: Callable[[Any], bool]) -> bool:
    """Whether some records have such a value, and no record another."""
    said = [record[key] for record in records if holds_content(key, record.get(key))]
    return bool(said) and all(map(is_value, said))


def are_messages(value: Any) -> bool:
    """Whether it is a list of messages in a layout that is known, which may be written as JSON."""
    if type(value) is str:
        with suppress(RecordError):
            value = messages_in({"": value}, "")
    if type(value) is not list or not value or type(value[0]) is not dict:
        return False
    return bool({"role", "from"} & value[0].keys()) or exchange_of(value[0]) is not None


def _are_exchanges(value: Any) -> bool:
    """Whether it is a list of questions with their answers, perhaps none."""
    return type(value) is list and all(type(one) is list and [*map(type, one)] == [str, str] for one in value)


def _is_said(value: Any) -> bool:
    """Whether it may be what somebody asked or answered."""
    return (type(value) is str and bool(value.strip())) or are_messages(value)


def _are_tokens(value: Any) -> bool:
    return type(value) is list and bool(value) and set(map(type, value)) == {int}


def _is_text(value: Any) -> bool:
    return type(value) is str and bool(value.strip())


#: Which keys may have what is needed: words in their names, and what their values are.
_KINDS: dict[str, tuple[set[str], Callable[[Any], bool]]] = {
    "messages": (set(), are_messages),
    "ask": (_ASKS, _is_said),
    "answer": (_ANSWERS, _is_said),
    "instruction": (_INSTRUCTIONS, _is_said),
    "input": (_INPUTS, lambda value: type(value) is str),  # most may be blank
    "context": (_CONTEXT, _is_text),
    "response": (_RESPONSE, _is_text),
    "source": (_SOURCE, _is_text),
    "target": (_TARGET, _is_text),
    "system": (_SYSTEM, _is_text),
    "history": (set(), _are_exchanges),
    "text": (_TEXTS, _is_text),
    "tokens": (_TOKENS, _are_tokens),
    "length": (_LENGTHS, lambda value: type(value) is int and value > 0),
}


def may_count(message: Message) -> bool:
    """Whether a message may count in the loss."""
    return message.loss is True or (message.role == "assistant" and message.loss is not False)


def can_be_read(records: Sequence[JsonObject], name: str, columns: dict[str, str]) -> bool:
    """Whether half of the records, or more, become something to train by the schema `name` with these keys.

    Of what these have no content may be left unread.
    """
    schema, read = SCHEMAS[name], list[JsonObject]()
    usual = {role: keys[0] for role, keys in schema.roles.items()}
    names = [other for other in SCHEMAS if columns.keys() <= SCHEMAS[other].roles.keys()]
    for record in records:
        with suppress(DataError, RecursionError):
            reading = choose_reading(record, names, columns, is_chosen=False)
            if reading is not None and reading.schema == name:
                layout = RecordLayout(name, {**usual, **columns, **reading.keys}, "")
                parsed = with_left_over(layout, record, schema.parse(record, layout.columns))
                if not isinstance(parsed, Conversation) or any(map(may_count, parsed.messages)):
                    read.append(record)
    return 2 * len(read) >= len(records) > 0 and not unread_content(RecordLayout(name, usual | columns, ""), read)
