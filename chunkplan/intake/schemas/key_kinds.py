"""What a key that no schema knows may be, by its name; in messages such keys are refused where they may say much.

Neither names nor values alone decide: names of data sets are without number, and so are texts about a text.
docs/data.md has the rule for users.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

from chunkplan.intake.records import REASONING, JsonObject
from chunkplan.intake.schemas.fields import is_blank, json_type, unsupported, words_of
from chunkplan.intake.schemas.loss_flags import FLAGS
from chunkplan.intake.schemas.marks import ignoring, refuse_unread

#: "about": it says something about the record; "mark": what counts; "variable": what a chat template may ask for;
#: "thought": what was thought before an answer; "given": what the model is given; "asked": that too, beside a question,
#: while messages have a copy of it.
Kind = Literal["about", "mark", "variable", "thought", "given", "asked", "other"]


def _words(text: str) -> frozenset[str]:
    return frozenset(word for one in text.split() for word in words_of(one))


#: What a key is whose name ends in one of these.
_ABOUT = _words(
    "id uid uuid guid hash md5 sha checksum source origin provenance url uri link doi isbn domain site website host "
    "path file filename filepath folder repo repository commit dataset corpus subset split config task type kind "
    "category class label tag topic subject subtopic theme field lang language locale country region license licence "
    "copyright author creator annotator worker username publisher journal editor name title date time timestamp "
    "created updated at year version revision model generator engine provider temperature score rating rank quality "
    "difficulty level grade toxicity status state length len num number count token index idx position row turn round "
    "metadata meta info extra statistic test"
)

#: A key with one of these in its name is a system text.
SYSTEM = _words("system sys")

#: What a key is that has one of these in its name; the first that fits.
_KINDS: tuple[tuple[Kind, frozenset[str]], ...] = (
    ("mark", _words("mask masked loss weight train training trainable")),
    ("variable", _words("kwargs enable")),
    ("thought", _words("reasoning thinking thought cot rationale explanation")),
    ("given", SYSTEM | _words("context document passage paragraph knowledge evidence background")),
    ("asked", _words("input choice option hint premise tool function shot example demonstration")),
)

#: A number in a message that counts something or says when is in a key whose name ends in one of these.
_COUNTED = _words("id uid index idx position row number num turn round timestamp time date at length len count token")

#: Keys of messages that chat templates read; of the last, true or false.
_OF_TEMPLATES = {
    *("tool_calls", "tool_call_id", "tool_responses", "tool_plan", "tools", "function_call", "name", "recipient"),
    *("channel", "citations", "metadata", "content_type", *REASONING),
}
_TRUTHS = {"prefix", "end_turn"}
READ_IN_MESSAGES = _OF_TEMPLATES | _TRUTHS | FLAGS


@lru_cache(maxsize=1 << 12)
def kind_of(key: str) -> Kind:
    """What a key may be, by its name."""
    if not _ABOUT.isdisjoint(_ends(key)):
        return "about"
    words = {*words_of(key), *words_of(key.lower())}  # `Complex_CoT` is two words to one of the two
    return next((kind for kind, some in _KINDS if not some.isdisjoint(words)), "other")


def refuse_in_message(fields: JsonObject, path: str) -> None:
    """Raises RecordError where `fields` of the message at `path` may say what is learnt, or what is given.

    Its flags are not among them.
    """
    for key, value in fields.items():
        name = f"{path}.{key}"
        if is_flag(key, value):
            refuse_unread(name, f"{json_type(value)} that may say what counts in the loss")
        elif key not in READ_IN_MESSAGES and type(value) is str and not is_blank(value):
            kind = kind_of(key)
            if kind == "thought":
                unsupported(
                    f"`{name}` has what was thought before an answer, under a name that no chat template reads",
                    hint=f"name it `reasoning_content`; to train without it: {ignoring(name)}",
                )
            if kind == "given":
                refuse_unread(name, "text that the model may be given: put it into the content of a message")


def is_flag(key: str, value: Any) -> bool:
    """Whether a value in a message may say what counts: numbers or truth values that nobody is known to mean else."""
    kinds = {type(one) for one in (value if type(value) is list else [value])}
    if kinds.isdisjoint((bool, int, float)) or key in _TRUTHS:
        return False
    return bool in kinds or _COUNTED.isdisjoint(_ends(key))


def _ends(key: str) -> set[str]:
    return {words[-1] for words in (words_of(key), words_of(key.lower())) if words}
