"""What may stand beside an answer, in every schema that trains one: a system text, earlier exchanges, a label."""

from __future__ import annotations

from chunkplan.intake.records import JsonObject, Message
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.schemas.fields import is_blank, optional_text, typed, unsupported, wrong

#: Optional roles of these schemas.
BESIDE = {"system": ("system",), "history": ("history",), "label": ("label", "kto_tag")}

#: Keys that other programs use for other labels too, such as numbers of classes.
_LABELS = BESIDE["label"]


def refuse_answer(record: JsonObject, columns: dict[str, str]) -> None:
    """Raises RecordError where the answer of `record` is labelled as a bad one, or exchanges come before it."""
    named = columns["label"]
    for key in _LABELS if named in _LABELS else (named,):
        label = record.get(key)
        if label is False:
            raise RecordError(
                f"`{key}` is false: a bad answer, as data for KTO have them, and every answer is trained",
                reason="undesirable",
                hint=f"--undesirable drop leaves such records out, counted; remove `{key}` if it means another thing",
            )
        if label is not None and key not in _LABELS:  # a key that the user has named
            typed(label, bool, key)
    key = columns["history"]
    if record.get(key):
        unsupported(
            f"`{key}` has earlier exchanges, which are not planned in this layout",
            hint=f"write the whole conversation as `messages`; remove `{key}` if it means another thing",
        )


def is_label(value: object, key: str) -> bool:
    """Whether `value`, found under `key` of the role `label`, is one; anything but a boolean is of no concern."""
    return isinstance(value, bool) or key not in _LABELS


def begin_with_system(
    messages: tuple[Message, ...], record: JsonObject, columns: dict[str, str], path: str
) -> tuple[Message, ...]:
    """The messages, found at `path`, behind the system text that `record` has beside them, if it has one.

    Raises:
        RecordError: that is no text, or the messages begin with another.
    """
    system = optional_text(record, columns["system"])
    if system is None:
        return messages
    first = messages[0]
    if first.role != "system":
        return (Message("system", system), *messages)
    if is_blank(first.content):
        return (Message("system", system), *messages[1:])
    if (first.content or "").strip() != system.strip():
        wrong(
            f"`{columns['system']}` and the system message that `{path}` begins with say different things",
            hint="leave one of the two out",
        )
    return messages
