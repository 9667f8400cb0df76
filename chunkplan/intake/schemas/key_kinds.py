"""What a key that no schema knows may be, by its name; in messages such keys are refused where they may say much.

Neither names nor values alone decide: names of data sets are without number, and so are texts about a text.
docs/data.md has the rule for users.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

from chunkplan.intake.records import REASONING, JsonObject
from chunkplan.intake.schemas.fields import is_blank, json_type, unsupported, words_of
from chunkplan.intake.schemas.loss_flags import FLAGS, NUMBERS
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
    "metadata meta info extra statistic test testcase alias comment note truth seed"
)

#: A text under a name that ends in one of these, beside another text, may be what answers it.
ANSWERS = _words("summary answer response completion output reply solution highlight code")

#: A key whose name begins so says what the record was made from.
_ORIGIN = "original"

#: Numbers under names that end in one of these are no flags, whatever else the name says.
_NUMBERED = _words("id uid uuid idx index")

#: A number or truth value under a name with one of these may say what counts.
_MARKS = _words("mask masked masking unmasked loss lossmask weight train training trained trainable istrain")

#: A key with one of these in its name is a system text.
SYSTEM = _words("system sys")

#: What a key is that has one of these in its name; the first that fits.
_KINDS: tuple[tuple[Kind, frozenset[str]], ...] = (
    ("mark", _MARKS),
    ("variable", _words("kwargs enable")),
    ("thought", _words("reasoning thinking thought cot rationale explanation analysis reflection")),
    (
        "given",
        SYSTEM
        | _words("context document passage paragraph knowledge evidence background instruction developer persona"),
    ),
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
    words = {*words_of(key), *words_of(key.lower())}  # `Complex_CoT` is two words to one of the two
    if not _ABOUT.isdisjoint(_ends(key)) or words_of(key)[:1] == [_ORIGIN]:
        return "about"
    return next((kind for kind, some in _KINDS if not some.isdisjoint(words)), "other")


def refuse_in_message(fields: JsonObject, path: str) -> None:
    """Raises RecordError where `fields` of the message at `path` may say what is learnt, or what is given.

    Its flags are not among them.
    """
    flags = [key for key, value in fields.items() if is_flag(key, value)]
    if flags:
        names = [f"{path}.{key}" for key in flags]
        refuse_unread(*names, says=f"{json_type(fields[flags[0]])} that may say what counts in the loss")
    for key, value in fields.items():
        name = f"{path}.{key}"
        if key not in READ_IN_MESSAGES and type(value) is str and not is_blank(value):
            kind = kind_of(key)
            if kind == "thought":
                unsupported(
                    f"`{name}` has what was thought before an answer, under a name that no chat template reads",
                    hint=f"name it `reasoning_content`; to train without it: {ignoring(name)}",
                )
            if kind == "given":
                refuse_unread(name, says="text that the model may be given: put it into the content of a message")


def is_flag(key: str, value: Any) -> bool:
    """Whether a value in a message may say what counts: numbers or truth values that nobody is known to mean else.

    Of an object it is those whose names say so.
    """
    values = value if type(value) is list else [value]
    kinds = set(map(type, values))
    if dict in kinds:
        objects = (
            [one for one in values if type(one) is dict] if key == "metadata" or key not in READ_IN_MESSAGES else []
        )
        return any(may_mark(inner) and is_number(one) for each in objects for inner, one in each.items())
    if may_mark(key) and any(map(is_number, values)):
        return True
    if kinds.isdisjoint((bool, int, float)) or key in _TRUTHS:
        return False
    return bool in kinds or _COUNTED.isdisjoint(_ends(key))


@lru_cache(maxsize=1 << 12)
def may_mark(key: str) -> bool:
    """Whether a number under a key may say what counts in the loss, by its name."""
    words = words_of(key)
    return not _MARKS.isdisjoint((*words, *words_of(key.lower()))) and _NUMBERED.isdisjoint(words[-1:])


def is_number(value: Any) -> bool:
    """Whether a value is a number or a truth value, perhaps written as a string."""
    return isinstance(value, (bool, int, float)) or (type(value) is str and NUMBERS.fullmatch(value) is not None)


def _ends(key: str) -> set[str]:
    return {words[-1] for words in (words_of(key), words_of(key.lower())) if words}
