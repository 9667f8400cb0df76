"""The ways in which records can be read: by which schema, with which keys; and what to do where none is known.

None is chosen by guessing. Keys are only suggested if most of the records can be read with them, and nothing of their
content is left unread; else the hint names all that holds content.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import permutations
from typing import Any, NamedTuple

from chunkplan.errors import DataError
from chunkplan.intake.records import Conversation, JsonObject, Message, Record, RecordError
from chunkplan.intake.schemas.fields import CHOOSE, LayoutError, column_flags, messages_in, quoted, shortened, words_of
from chunkplan.intake.schemas.keys import holds_content, keys_of_content, words
from chunkplan.intake.schemas.messages import ROLES, SPEAKER_KEYS, exchange_of, is_message, new_roles, parse_messages
from chunkplan.intake.schemas.table import GROUPS, SCHEMAS, RecordLayout, has_all
from chunkplan.intake.schemas.unread import check_unread, count_unread
from chunkplan.quantities import counted

#: Hint to give the layout of records.
SAY = "say which with --format NAME, or name the keys with --column ROLE=KEY"
_SAY_LISTED = f"{SAY}; `chunkplan analyze --help` lists the schemas"

#: What a record that has all of its content where it is read looks like.
_SHAPES = (
    '{"prompt": TEXT, "completion": TEXT} or {"messages": [{"role": "user", "content": TEXT}, {"role": "assistant", '
    '"content": TEXT}]}, with all of that in it'
)

#: Keys of a message that may say what is said, in layouts that are not known as well.
_CONTENTS = ("content", "value", "text", "message", "body", "utterance")

#: Words in the names of keys, and what has such names.
_ASKS = words("instruction question prompt query problem input user human request q inquiry")
_ANSWERS = words("answer response output completion solution reply generation assistant target gpt bot a")
_TEXTS = words("text content body document doc article passage story")

#: A text that goes on, with nothing between, has one of the first in its names, and none of the others: these are of
#: somebody who asks and somebody who answers, each of which a chat template marks.
_GOES_ON = words("prompt completion generation")
_IS_SAID = (_ASKS | _ANSWERS) - _GOES_ON - words("input output solution target")

#: Words that say that a key is something else: something about a text, or a system text.
_ABOUT = words(
    "id ids type source lang language category name url date time length len num number count index hash score path "
    "title format rejected system sys"
)
_BARRED = {**dict.fromkeys(("ask", "answer", "instruction", "input"), _ABOUT), "text": _ABOUT | _ASKS | _ANSWERS}

#: Name parts of keys of which two answers are to be compared.
_COMPARED = words("expected final gold reference correct true")

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


class Reading(NamedTuple):
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
    """Return how `record` is read by one of the schemas `names`, or None.

    It is the first that fits of the schemas that explain most of the record. Another that explains as much must read
    the same, or only a part of it; else LayoutError is raised. `named` are keys that the user gave, and `is_chosen` is
    true if the user named the schema.
    """
    for group in GROUPS:
        found = [
            Reading(name, keys)
            for name in group
            if name in names
            for keys in SCHEMAS[name].choices(named)
            if has_all(record, keys) and (is_chosen or named.keys() & keys or _may_be(name, keys, record))
        ]
        if found:
            return found[0] if len(found) == 1 else _only(record, found, named)
    return None


def _may_be(name: str, keys: Mapping[str, str], record: JsonObject) -> bool:
    """Return whether ambiguous keys have the values that the schema `name` means; beside a length no text may stand."""
    if name == "length":
        return not any(
            isinstance(value, (list, dict)) or (isinstance(value, str) and len(value.split(maxsplit=1)) > 1)
            for value in record.values()
        )
    if name == "prompt_ids+response_ids":
        return all(isinstance(one, list) and set(map(type, one)) <= {int} for one in map(record.get, keys.values()))
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
            hint = f"{CHOOSE}{column_flags(first[0].keys)}, or {column_flags(reading.keys)}"
            if reading.schema != "length":
                hint = "they are two sequences: write a record for each, or take away the key that is not trained"
            ways = f"{first[0].words}, or {reading.words}"
            raise LayoutError(f"a record can be read in two ways that differ: {ways}", hint=hint)
    return found[0] if first is None else first[0]


def suggest(
    records: Sequence[JsonObject], names: Sequence[str], named: Mapping[str, str]
) -> tuple[str, dict[str, str]] | None:
    """Return the schema of `names` that reads `records` with suggested keys, role -> key, including those `named`."""
    found = {kind: _only_key(records, named, kind) for kind in _KINDS}
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
            if len({*keys.values()}) == len(keys) and _can_be_read(records, name, keys):
                return name, keys
    return None


def unread_content(layout: RecordLayout, records: Sequence[JsonObject]) -> list[str]:
    """The keys with content that are not read of `records`, which can be."""
    content = {*keys_of_content(records)}
    unread = count_unread(layout, records)
    return [key for key in unread if key in content or not any(key in record for record in records)]  # of messages


def are_messages_each(records: Sequence[JsonObject]) -> bool:
    """Return whether each record is one message of a conversation."""
    return all(is_message(record) or ("role" in record and "content" in record) for record in records)


def fallback_hint(records: Sequence[JsonObject], names: Sequence[str], named: Mapping[str, str]) -> str:
    """The hint of records that no keys are suggested for, which names all that holds content."""
    if are_messages_each(records):
        if tree := next((key for key in ("parent_id", "message_tree_id") if any(key in one for one in records)), None):
            return (
                f"a record is one message of a tree (`{tree}`): write the messages from a root to each answer that is "
                "to be trained as one record with `messages`; --format text reads each as a text of its own"
            )
        return "a record is one message: write all messages of a conversation as one record with `messages`"
    content = keys_of_content(records)
    lists = {key: objects for key in records[0] if _is_plain(key) and (objects := _list_of_objects(records[0], key))}
    for key, messages in lists.items():
        advice, inside = _conversation_advice(records, key, messages)
        others = [other for other in content if f"`{other}`" not in advice] + inside
        if advice and others:
            advice += f"; what {quoted(others)} {'has' if len(others) == 1 else 'have'} goes into its messages too"
        if advice:
            return advice
    if len(records) == len(lists) == 1 and content == [*lists]:
        [(key, objects)] = lists.items()
        return f"`{key}` is a list of {counted(len(objects), 'object')}: write these as the records"
    if len(content) == 2 and not named and "prompt+completion" in names and all(map(_is_plain, content)):
        pairs = [{"prompt": one, "completion": other} for one, other in permutations(content)]
        if _can_be_read(records, "prompt+completion", pairs[0]):
            ways = f"{column_flags(pairs[0])}, or {column_flags(pairs[1])}"
            return f"{quoted(content)} are two texts: write both as one `text`, or {CHOOSE}{ways}"
    if len(content) > 1:
        return f"nothing says how {quoted(content)} go together: write records as {_SHAPES}, or {_SAY_LISTED}"
    if any(type(record.get(key)) in (list, dict) for record in records for key in content):
        return f"nothing reads what {quoted(content)} has in it: write records as {_SHAPES}, or {_SAY_LISTED}"
    return _SAY_LISTED


def _conversation_advice(records: Sequence[JsonObject], key: str, messages: list[JsonObject]) -> tuple[str, list[str]]:
    """Return advice for a conversation under `key`, "" where it is none, and its other keys with content."""
    texts = {name: text for name, text in messages[0].items() if type(text) is str}
    said = next((name for name in _CONTENTS if name in texts), None)
    speaker = next((name for name in texts if name in SPEAKER_KEYS or texts[name].lower() in ROLES), said)
    is_known = (speaker, said) in (("role", "content"), ("role", "value"), ("from", "value"))
    if said and speaker and said != speaker and not is_known:
        speakers = dict.fromkeys(str(message.get(speaker)) for message in messages)
        unknown = [name for name in speakers if name.lower() not in ROLES]
        keys = {"role": speaker, "content": said, **new_roles(speakers)}
        return (
            f"`{key}` is a conversation whose messages have `{shortened(speaker)}` and `{said}`: "
            "name these keys `role` and `content`, and the list `messages`"
            + (f", and {quoted(unknown)} `user` or `assistant`" if unknown else "")
            + f"; or say so: {column_flags({'messages': key})} --column "
            + shlex.quote(",".join(map("=".join, keys.items())))
        ), [f"{key}[].{inside}" for inside in keys_of_content(messages) if inside not in (speaker, said)]
    return (_unanswered_advice(records, key) if _are_messages(messages) else ""), []


def _unanswered_advice(records: Sequence[JsonObject], key: str) -> str:
    """Return advice for messages under `key` that no key alone makes records of a schema."""
    with suppress(RecordError):
        if any(map(_may_count, parse_messages(messages_in(records[0], key), key))):
            return f"`{key}` is a conversation: name the list `messages`"
    answer = _only_key(records, {}, "answer")
    if answer and answer != key and type(records[0].get(answer)) is str:
        added = f"add `{answer}` to its messages as one with the `role` assistant, and name the list `messages`"
        return f"`{key}` has no answer: {added}"
    needed = "each of its messages needs a `role` and a `content`, and one has to be the assistant's"
    return f"`{key}` is a conversation: {needed}"


def _list_of_objects(record: JsonObject, key: str) -> list[JsonObject]:
    """The list of objects that `record` has under `key`, which may be written as JSON; nothing where it is another."""
    with suppress(RecordError):
        value = messages_in(record, key)
        return value if all(type(one) is dict for one in value) else []
    return []


def _only_key(records: Sequence[JsonObject], named: Mapping[str, str], kind: str) -> str | None:
    """Return the one key of this kind whose name and values fit best: has fewest other words; None for several."""
    named_so, is_value = _KINDS[kind]
    barred = _BARRED.get(kind, frozenset())
    fitting = [
        key
        for key in dict.fromkeys(key for record in records for key in record)
        if _is_plain(key) and key not in named.values() and barred.isdisjoint(words_of(key))
        if _have_values(records, key, is_value, is_beside=kind in _BESIDE)
    ]
    distances = {key: len(words_of(key)) for key in fitting if named_so.intersection(words_of(key))}
    closest = [key for key, distance in distances.items() if distance == min(distances.values())]
    if kind == "text":
        several = [key for key in fitting if any(" " in str(record.get(key)).strip() for record in records)]
        closest = several if not distances or not {*several} <= {*closest} else closest
    if kind in ("messages", "history"):
        closest = fitting
    if kind == "answer" and len(closest) > 1:
        closest = [key for key in closest if _COMPARED.isdisjoint(words_of(key))]
    return closest[0] if len(closest) == 1 else None


def _is_plain(key: str) -> bool:
    """Return whether `key` can be shown and pasted."""
    return bool(key) and key.isprintable() and len(key) <= _LONGEST


def _have_values(records: Sequence[JsonObject], key: str, is_value: Callable[[Any], bool], *, is_beside: bool) -> bool:
    """Return whether half of the records have such a value; for optional roles, whether all non-empty ones are such."""
    if not is_beside:
        return 2 * sum(is_value(record.get(key)) for record in records) >= len(records)
    said = [record[key] for record in records if holds_content(key, record.get(key))]
    return bool(said) and all(map(is_value, said))


def _are_messages(value: Any) -> bool:
    """Return whether it is a list of messages in a known layout, which may be written as JSON."""
    if type(value) is str:
        with suppress(RecordError):
            value = messages_in({"": value}, "")
    if type(value) is not list or not value or type(value[0]) is not dict:
        return False
    return bool({"role", "from"} & value[0].keys()) or exchange_of(value[0]) is not None


def _are_exchanges(value: Any) -> bool:
    """Return whether it is a list of questions with their answers, perhaps none."""
    return type(value) is list and all(type(one) is list and [*map(type, one)] == [str, str] for one in value)


def _is_text(value: Any) -> bool:
    return type(value) is str and bool(value.strip())


def _is_utterance(value: Any) -> bool:
    """Return whether it may be a question or an answer."""
    return _is_text(value) or _are_messages(value)


#: Candidate keys for a role: words in their names, and types of their values.
_KINDS: dict[str, tuple[frozenset[str], Callable[[Any], bool]]] = {
    "messages": (frozenset(), _are_messages),
    "ask": (_ASKS, _is_utterance),
    "answer": (_ANSWERS, _is_utterance),
    "instruction": (words("instruction"), _is_utterance),
    "input": (words("input context"), lambda value: type(value) is str),  # most may be blank
    **{word: (words(word), _is_text) for word in ("context", "response", "source", "target")},
    "system": (words("system sys"), _is_text),
    "history": (frozenset(), _are_exchanges),
    "text": (_TEXTS, _is_text),
    "tokens": (words("token id ids"), lambda value: type(value) is list and set(map(type, value)) == {int}),
    "length": (words("length len token"), lambda value: type(value) is int and value > 0),
}


def _may_count(message: Message) -> bool:
    return message.loss is True or (message.role == "assistant" and message.loss is not False)


def _can_be_read(records: Sequence[JsonObject], name: str, columns: dict[str, str]) -> bool:
    """Return whether half of the records, or more, can be trained by this schema with no content left unread."""
    schema, read = SCHEMAS[name], list[JsonObject]()
    usual = {role: keys[0] for role, keys in schema.roles.items()}
    names = [other for other in SCHEMAS if columns.keys() <= SCHEMAS[other].roles.keys()]
    for record in records:
        with suppress(DataError, RecursionError):
            reading = choose_reading(record, names, columns, is_chosen=False)
            if reading is not None and reading.schema == name:
                layout = RecordLayout(name, {**usual, **columns, **reading.keys}, "")
                parsed = check_unread(layout, record, schema.parse(record, layout.columns))
                if not isinstance(parsed, Conversation) or any(map(_may_count, parsed.messages)):
                    read.append(record)
    return 2 * len(read) >= len(records) > 0 and not unread_content(RecordLayout(name, usual | columns, ""), read)
