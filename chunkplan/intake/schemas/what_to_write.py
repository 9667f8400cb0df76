"""Where no keys are suggested: what to write, or what to choose from, in words that name all that holds content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import permutations

from chunkplan.intake.records import JsonObject
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.schemas.content import keys_of_content
from chunkplan.intake.schemas.fields import messages_in, quoted, shortened
from chunkplan.intake.schemas.flags import CHOOSE, Flag, column_flags, spaced
from chunkplan.intake.schemas.message_list import parse_messages
from chunkplan.intake.schemas.roles import ROLES, SPEAKERS, is_message
from chunkplan.intake.schemas.suggestion import are_messages, can_be_read, is_plain, may_count, only_key
from chunkplan.quantities import counted

#: Keys of a message that may say what is said, in layouts that are not known as well.
_SAID = ("content", "value", "text", "message", "body", "utterance")

#: Those that are known together.
_KNOWN = (("role", "content"), ("role", "value"), ("from", "value"))

#: What a record that has all of its content where it is read looks like.
_SHAPES = (
    '{"prompt": TEXT, "completion": TEXT} or {"messages": [{"role": "user", "content": TEXT}, {"role": "assistant", '
    '"content": TEXT}]}, with all of that in it'
)

#: How the user may say how records are laid out, and where all schemas are.
SAY = ("say which with ", Flag("--format", "NAME"), ", or name the keys with ", Flag("--column", "ROLE=KEY"))
_LIST = "; `chunkplan analyze --help` lists the schemas"


def are_messages_each(records: Sequence[JsonObject]) -> bool:
    """Whether each record is one message of a conversation."""
    return all(is_message(record) or ("role" in record and "content" in record) for record in records)


def what_else(records: Sequence[JsonObject], names: Sequence[str], named: Mapping[str, str]) -> list[str | Flag]:
    """What to do with records that no keys are suggested for, as parts of a hint that names all that holds content."""
    if are_messages_each(records):
        if tree := next((key for key in ("parent_id", "message_tree_id") if any(key in one for one in records)), None):
            return [
                f"a record is one message of a tree (`{tree}`): write the messages from a root to each answer that is "
                "to be trained as one record with `messages`; --format text reads each as a text of its own"
            ]
        return ["a record is one message: write all messages of a conversation as one record with `messages`"]
    content = keys_of_content(records)
    lists = {key: objects for key in records[0] if is_plain(key) and (objects := _objects_in(records[0], key))}
    for key, messages in lists.items():
        words, inside = _of_messages(records, key, messages)
        others = [other for other in content if f"`{other}`" not in words] + inside
        if words and others:
            words += f"; what {quoted(others)} {'has' if len(others) == 1 else 'have'} goes into its messages too"
        if words:
            return [words]
    if len(records) == len(lists) == 1 and content == [*lists]:
        [(key, objects)] = lists.items()
        return [f"`{key}` is a list of {counted(len(objects), 'object')}: write these as the records"]
    pairs = [{"prompt": one, "completion": other} for one, other in permutations(content[:3], 2)]
    are_two = len(pairs) == 2 and not named and "prompt+completion" in names and all(map(is_plain, content))
    if are_two and can_be_read(records, "prompt+completion", pairs[0]):
        one, other = (spaced(column_flags(pair)) for pair in pairs)
        return [f"{quoted(content)} are two texts: write both as one `text`, or ", CHOOSE, *one, ", or ", *other]
    if len(content) > 1:
        return [f"nothing says how {quoted(content)} go together: write records as {_SHAPES}, or ", *SAY, _LIST]
    if any(type(record.get(key)) in (list, dict) for record in records for key in content):
        return [f"nothing reads what {quoted(content)} has in it: write records as {_SHAPES}, or ", *SAY, _LIST]
    return [*SAY, _LIST]


def _of_messages(records: Sequence[JsonObject], key: str, messages: list[JsonObject]) -> tuple[str, list[str]]:
    """What to do with a conversation under `key`, "" where it is none, and what else with content its messages have."""
    texts = {name: text for name, text in messages[0].items() if type(text) is str}
    said = next((name for name in _SAID if name in texts), None)
    speaker = next((name for name in texts if name in SPEAKERS or texts[name].lower() in ROLES), said)
    if said and speaker and said != speaker and (speaker, said) not in _KNOWN:
        speakers = dict.fromkeys(str(message.get(speaker)) for message in messages)
        unknown = [name for name in speakers if name.lower() not in ROLES]
        return (
            f"`{key}` is a conversation whose messages have `{shortened(speaker)}` and `{said}`: "
            "name these keys `role` and `content`, and the list `messages`"
            + (f", and {quoted(unknown)} `user` or `assistant`" if unknown else "")
        ), [f"{key}[].{inside}" for inside in keys_of_content(messages) if inside not in (speaker, said)]
    return (_unanswered(records, key) if are_messages(messages) else ""), []


def _unanswered(records: Sequence[JsonObject], key: str) -> str:
    """What to do with messages under `key` that no key alone makes records of a schema."""
    with suppress(RecordError):
        if any(map(may_count, parse_messages(messages_in(records[0], key), key))):
            return f"`{key}` is a conversation: name the list `messages`"
    answer = only_key(records, {}, "answer")
    if answer and answer != key and type(records[0].get(answer)) is str:
        return (
            f"`{key}` has no answer: add `{answer}` to its messages as one with the `role` assistant, "
            "and name the list `messages`"
        )
    return (
        f"`{key}` is a conversation: each of its messages needs a `role` and a `content`, "
        "and one has to be the assistant's"
    )


def _objects_in(record: JsonObject, key: str) -> list[JsonObject]:
    """The list of objects that `record` has under `key`, which may be written as JSON; nothing where it is another."""
    with suppress(RecordError):
        value = messages_in(record, key)
        return value if value and all(type(one) is dict for one in value) else []
    return []
