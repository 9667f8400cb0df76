"""Classifies keys that no schema knows by their names, and lists the keys that say what counts in the loss.

Neither names nor values alone decide: both vary without limit. docs/data.md has the rule for users.

Flags: 1 or true means that a message counts, whoever wrote it.

- `loss`: ms-swift; `loss_weight`: LLaMA-Factory; `weight`: OpenAI and Mistral; `train`, `training`: axolotl;
- `trainable`: tinker-cookbook (renderers, TrainOnWhat.CUSTOMIZED); `loss_mask`: verl (utils/dataset/
  multiturn_sft_dataset.py); `output_with_loss`: XTuner, of the answer; `is_train`: nobody's, but of one meaning.

A true `masked` means that the message does not count (pytorch/torchtune, Message in data/_messages.py).
`step_loss_mask` (slime, utils/mask_utils.py) takes an answer away and adds none. `mask` has both meanings in the wild:
it is refused, except in NeMo's layout, where it names the speaker who does not count. `train_detail` is axolotl's key
for parts of a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal

from chunkplan.intake.records import REASONING, JsonObject
from chunkplan.intake.schemas.fields import words_of

#: Key of a flag -> whether 1 says that a message counts.
COUNTS = {
    **dict.fromkeys(("loss", "loss_weight", "weight", "train", "training", "trainable", "loss_mask"), True),
    **dict.fromkeys(("step_loss_mask", "is_train", "output_with_loss"), True),
    "masked": False,
}

#: A message without these keys does not say whether it counts.
FLAGS = frozenset((*COUNTS, "mask", "train_detail"))

#: "about": it says something about the record; "mark": what counts; "variable": what a chat template may ask for;
#: "thought": what was thought before an answer; "given": what the model is given; "asked": that too, beside a question,
#: while messages have a copy of it.
Kind = Literal["about", "mark", "variable", "thought", "given", "asked", "other"]


def words(text: str) -> frozenset[str]:
    """The words in the names of keys that `text` lists, as `words_of` has them."""
    return frozenset(word for one in text.split() for word in words_of(one))


#: Meaning of a key whose name ends in one of these.
_ABOUT = words(
    "id uid uuid guid hash md5 sha checksum source origin provenance url uri link doi isbn domain site website host "
    "path file filename filepath folder repo repository commit dataset corpus subset split config task type kind "
    "category class label tag topic subject subtopic theme field lang language locale country region license licence "
    "copyright author creator annotator worker username publisher journal editor name title date time timestamp "
    "created updated at year version revision model generator engine provider temperature score rating rank quality "
    "difficulty level grade toxicity status state length len num number count token index idx position row turn round "
    "metadata meta info extra statistic test testcase alias comment note truth seed"
)

#: A text under a name that ends in one of these, beside another text, may be what answers it.
ANSWERS = words("summary answer response completion output reply solution highlight code")

#: Numbers under names that end in one of these are no flags, whatever else the name says.
_NUMBERED = words("id uid uuid idx index")

#: A number or truth value under a name with one of these may say what counts.
_MARKS = words("mask masked masking unmasked loss lossmask weight train training trained trainable istrain")

#: A key with one of these in its name is a system text.
SYSTEM = words("system sys")

#: Meaning of a key that has one of these in its name; the first that fits.
_KINDS: tuple[tuple[Kind, frozenset[str]], ...] = (
    ("mark", _MARKS),
    ("variable", words("kwargs enable")),
    ("thought", words("reasoning thinking thought cot rationale explanation analysis reflection")),
    (
        "given",
        SYSTEM
        | words("context document passage paragraph knowledge evidence background instruction developer persona"),
    ),
    ("asked", words("input choice option hint premise tool function shot example demonstration")),
)

#: A number in a message that counts something or says when is in a key whose name ends in one of these.
_COUNTED = words("id uid index idx position row number num turn round timestamp time date at length len count token")

#: The last words of names of keys without content: whatever is in them, a number or one word, or a number.
_SAYS_ABOUT = words("id ids idx index uuid guid uid hash sha md5 digest checksum url uri date time timestamp datetime")
_SAYS_ABOUT |= words("at year")
_IN_A_WORD = words(
    "source name lang language model author domain dataset subset split origin seed meta metadata link path file "
    "filename version license licence"
)
_IN_A_NUMBER = words("num number count length len token size byte")

#: Keys of messages that chat templates read; of the last, true or false.
_OF_TEMPLATES = {
    *("tool_calls", "tool_call_id", "tool_responses", "tool_plan", "tools", "function_call", "name", "recipient"),
    *("channel", "citations", "metadata", "content_type", *REASONING),
}
_TRUTHS = {"prefix", "end_turn"}
READ_IN_MESSAGES = _OF_TEMPLATES | _TRUTHS | FLAGS

#: A number that says which tokens are a prompt has a word of both in its name.
_PARTS = {"prompt", "source", "src", "context", "answer", "completion", "response", "instruction"}
_PLACES = {"length", "len", "token", "start", "end", "idx", "index", "num", "size", "offset"}

_NUMBER = re.compile(r"\s*([0-9.]+|true|false)\s*", re.IGNORECASE)


@lru_cache(maxsize=1 << 12)
def kind_of(key: str) -> Kind:
    """Classify a key by its name."""
    found = {*words_of(key), *words_of(key.lower())}  # `Complex_CoT` is two words to one of the two
    if not _ABOUT.isdisjoint(_ends(key)) or words_of(key)[:1] == ["original"]:
        return "about"
    return next((kind for kind, some in _KINDS if not some.isdisjoint(found)), "other")


@lru_cache(maxsize=1 << 12)
def may_mark(key: str) -> bool:
    """Return whether a number under a key may say what counts in the loss, by its name."""
    found = words_of(key)
    return not _MARKS.isdisjoint((*found, *words_of(key.lower()))) and _NUMBERED.isdisjoint(found[-1:])


@lru_cache(maxsize=1 << 12)
def may_split(key: str) -> bool:
    """Return whether a number under a key may say which tokens are a prompt."""
    found = {*words_of(key)}
    return not found.isdisjoint(_PARTS) and not found.isdisjoint(_PLACES)


def may_say(key: str) -> bool:
    """Return whether a number under an unread key may say what is learnt of a record's tokens."""
    return may_mark(key) or may_split(key)


def is_flag(key: str, value: Any) -> bool:
    """Return whether a value in a message may say what counts; of an object, whether one of its keys does."""
    values = value if type(value) is list else [value]
    kinds = set(map(type, values))
    if dict in kinds:
        is_looked_into = key == "metadata" or key not in READ_IN_MESSAGES
        inside = [pair for one in values if type(one) is dict for pair in one.items()] if is_looked_into else []
        return any(may_mark(inner) and is_number(one) for inner, one in inside)
    if may_mark(key) and any(map(is_number, values)):
        return True
    if kinds.isdisjoint((bool, int, float)) or key in _TRUTHS:
        return False
    return bool in kinds or _COUNTED.isdisjoint(_ends(key))


def is_number(value: Any) -> bool:
    """Return whether a value is a number or a truth value, perhaps written as a string."""
    return isinstance(value, (bool, int, float)) or (type(value) is str and _NUMBER.fullmatch(value) is not None)


def keys_of_content(records: Iterable[JsonObject]) -> list[str]:
    """The keys under which one of `records` has content, in their order."""
    return list(dict.fromkeys(key for record in records for key, value in record.items() if holds_content(key, value)))


def holds_content(key: str, value: Any) -> bool:
    """Return whether `value`, found under `key`, may be trained, shown to the model, or mark what is."""
    if isinstance(value, dict):
        return any(holds_content(inner, one) for inner, one in value.items())
    if isinstance(value, (list, tuple)):
        are_numbers = any(isinstance(one, (bool, int, float)) for one in value)  # of each token, perhaps
        return are_numbers or any(holds_content(key, one) for one in value)
    found = words_of(key)
    if isinstance(value, str):
        about = _SAYS_ABOUT if len(value.split()) > 1 else _SAYS_ABOUT | _IN_A_WORD
        return bool(value.strip()) and about.isdisjoint(found[-1:])
    about = _SAYS_ABOUT | _IN_A_WORD | _IN_A_NUMBER
    return value is not None and about.isdisjoint(found[-1:]) and not {"n", "num"}.intersection(found[:1])


def _ends(key: str) -> set[str]:
    return {words[-1] for words in (words_of(key), words_of(key.lower())) if words}
