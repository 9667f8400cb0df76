"""What may stand beside an answer, in every schema that trains one: a system text, earlier exchanges, a label."""

from __future__ import annotations

from chunkplan.intake.records import Conversation, Exchange, JsonObject, Message
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.schemas.fields import is_blank, optional_text, typed, unsupported, wrong
from chunkplan.intake.schemas.message_list import parse_messages

#: Optional roles of these schemas, and of those that are conversations as well.
BESIDE = {
    "system": ("system", "system_prompt", "system_message", "system_instruction", "systemInstruction"),
    "history": ("history",),
    "label": ("label", "kto_tag"),
}
_SYSTEMS = frozenset(BESIDE["system"])
BESIDE_MESSAGES = {"tools": ("tools",), "functions": ("functions",), **BESIDE}

#: Keys that other programs use for other labels too, such as numbers of classes.
_LABELS = BESIDE["label"]
_OF_KTO = "kto_tag"  # which nobody uses for anything else


def refuse_answer(record: JsonObject, columns: dict[str, str]) -> None:
    """Raises RecordError where the answer of `record` is labelled as a bad one."""
    named = columns["label"]
    for key in _LABELS if named in _LABELS else (named,):
        label = record.get(key)
        if label is False or (key == _OF_KTO and label == 0):
            raise RecordError(
                f"`{key}` is false: a bad answer, as data for KTO have them, and every answer is trained",
                reason="undesirable",
                hint=f"--undesirable drop leaves such records out, counted; remove `{key}` if it means another thing",
            )
        if label is not None and key not in _LABELS:  # a key that the user has named
            typed(label, bool, key)


def refuse_history(record: JsonObject, columns: dict[str, str]) -> None:
    """Raises RecordError where `record` has earlier exchanges beside what has a place of its own for them."""
    key = columns["history"]
    if record.get(key):
        unsupported(
            f"`{key}` has earlier exchanges, which are not planned in this layout",
            hint=f"write the whole conversation as `messages`; remove `{key}` if it means another thing",
        )


def exchange_after(
    record: JsonObject, columns: dict[str, str], prompt: str, completion: str
) -> Exchange | Conversation:
    """A question and its answer, behind the system text and the `history` that `record` has beside them, if any.

    Answers in the history count in the loss like the last one.

    Raises:
        RecordError: the system is no text, or the history no list of pairs of texts.
    """
    exchange = Exchange(optional_text(record, system_key(record, columns)), prompt, completion)
    key = columns["history"]
    if not record.get(key):
        return exchange
    earlier: list[Message] = []
    for index, pair in enumerate(typed(record[key], list, key)):
        path = f"{key}[{index}]"
        if len(typed(pair, list, path)) != 2:
            wrong(f"`{path}` has {len(pair)} entries, expected a question and its answer")
        for place, role in enumerate(("user", "assistant")):
            earlier.append(Message(role, typed(pair[place], str, f"{path}[{place}]")))
    *system, question, answer = exchange.conversation.messages
    return Conversation((*system, *earlier, question, answer))


def is_label(value: object, key: str) -> bool:
    """Whether `value`, found under `key` of the role `label`, is one; others mean something else under usual names."""
    return isinstance(value, bool) or key not in _LABELS or (key == _OF_KTO and value in (0, 1))


def system_key(record: JsonObject, columns: dict[str, str]) -> str:
    """The key under which `record` has a system text: that of `columns`, or another usual one if that says nothing."""
    key, usual = columns["system"], BESIDE["system"]
    if key not in usual or _SYSTEMS.isdisjoint(record):
        return key
    values = {one: record.get(one) for one in (key, *usual)}
    said = (one for one, value in values.items() if value is not None and not (type(value) is str and is_blank(value)))
    return next(said, key)


def begin_with_system(
    messages: tuple[Message, ...], record: JsonObject, columns: dict[str, str], path: str
) -> tuple[Message, ...]:
    """The messages, found at `path`, behind the system text that `record` has beside them, if it has one.

    Gemini's is a message, with `parts`.

    Raises:
        RecordError: that is no text, or the messages begin with another.
    """
    key = system_key(record, columns)
    value = record.get(key)
    if isinstance(value, dict) and "parts" in value:
        [said] = parse_messages([{**value, "role": "system"}], key)
        system = None if is_blank(said.content) else said.content
    else:
        system = optional_text(record, key)
    if system is None:
        return messages
    first = messages[0]
    if first.role != "system":
        return (Message("system", system), *messages)
    if is_blank(first.content):
        return (Message("system", system), *messages[1:])
    if (first.content or "").strip() != system.strip():
        wrong(
            f"`{key}` and the system message that `{path}` begins with say different things",
            hint="write both as one, or leave one of the two out",
        )
    return messages
