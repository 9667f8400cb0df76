"""Flags that say what counts in the loss: those of a message, and those of a whole record.

1 or true means that a message counts, whoever wrote it:

- `loss`: ms-swift; `loss_weight`: LLaMA-Factory; `weight`: OpenAI and Mistral; `train`, `training`: axolotl;
- `trainable`: tinker-cookbook (renderers, TrainOnWhat.CUSTOMIZED); `loss_mask`: verl (utils/dataset/
  multiturn_sft_dataset.py); `output_with_loss`: XTuner, of the answer; `is_train`: nobody's, but of one meaning.

Of `masked` it means that it does not count (pytorch/torchtune, Message in data/_messages.py). `step_loss_mask` (slime,
utils/mask_utils.py) takes an answer away and adds none. `mask` means one to some and the other to others: it is
refused, but for the `mask` of a record in NeMo's layout, which names the speaker who does not count.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from chunkplan.intake.records import Conversation, Exchange, JsonObject, Record
from chunkplan.intake.schemas.fields import empty, json_type, unsupported, wrong
from chunkplan.intake.schemas.marks import ignoring
from chunkplan.intake.schemas.roles import ROLES

#: Key of a flag -> whether 1 says that a message counts.
COUNTS = {
    **dict.fromkeys(("loss", "loss_weight", "weight", "train", "training", "trainable", "loss_mask"), True),
    **dict.fromkeys(("step_loss_mask", "is_train", "output_with_loss"), True),
    "masked": False,
}

#: A string that may be a flag, or a list of them, and no word.
_LIKE_NUMBERS = re.compile(r"\s*([\[0-9]|(true|false)\s*$)", re.IGNORECASE)

#: A string that is one.
NUMBERS = re.compile(r"\s*([0-9.]+|true|false)\s*", re.IGNORECASE)

#: What means either.
_EITHER = "mask"

#: What axolotl reads for parts of a message.
_OF_PARTS = "train_detail"

#: A message without these keys does not say whether it counts.
FLAGS = frozenset((*COUNTS, _EITHER, _OF_PARTS))


def stated_loss(message: JsonObject, path: str) -> bool | None:
    """Whether the message at `path` counts in the loss, as its flags say; None where they say nothing.

    Raises:
        RecordError: what they say is neither yes nor no, means either, or they disagree.
    """
    if FLAGS.isdisjoint(message):
        return None
    if message.get(_OF_PARTS):
        unsupported(f"`{path}.{_OF_PARTS}` has parts of a message, which counts in the loss as a whole or not")
    if message.get(_EITHER) is not None:
        _refuse_either(f"{path}.{_EITHER}")
    stated = {
        key: _flag(message[key], f"{path}.{key}", f"{path}.{key}") == counts
        for key, counts in COUNTS.items()
        if message.get(key) is not None
    }
    if stated.get("step_loss_mask"):
        del stated["step_loss_mask"]
    if len(set(stated.values())) > 1:
        wrong(
            f"`{path}` says with {' and '.join(f'`{key}`' for key in stated)} both that it counts and that it does not"
        )
    return next(iter(stated.values()), None)


def with_flags_of_record(parsed: Record, record: JsonObject, read: Collection[str]) -> Record:
    """`parsed`, as the flags of the whole `record` say, but for those among the keys that are `read` otherwise.

    A list of them has an entry for each message (LLaMA-Factory: `loss_mask`), and takes answers away.

    Raises:
        RecordError: nothing of the record counts; what they say is neither yes nor no, or means either; or a list does
            not fit the messages.
    """
    for key, counts in COUNTS.items():
        value = record.get(key)
        if value is None or key in read or (type(value) is str and not _LIKE_NUMBERS.match(value)):
            continue
        if type(value) is list:
            flags = [_flag(one, f"{key}[{index}]", key) == counts for index, one in enumerate(value)]
            parsed = _by_message(parsed, flags, key)
        elif _flag(value, key, key) != counts:
            empty(f"`{key}` is {str(value).lower()}: nothing of the record counts in the loss")
    speaker = record.get(_EITHER)
    if speaker is not None and _EITHER not in read and ROLES.get(str(speaker).lower()) != "user":
        _refuse_either(_EITHER)
    return parsed


def _by_message(parsed: Record, counts: list[bool], key: str) -> Record:
    """`parsed` without the answers that do not count; a system message at its beginning may have no entry."""
    if not isinstance(parsed, (Conversation, Exchange)):
        unsupported(f"`{key}` is a list, and the record has no messages", hint=_unless(key))
    conversation = parsed.conversation if isinstance(parsed, Exchange) else parsed
    messages = conversation.messages
    if len(counts) == len(messages) - 1 and messages[0].role == "system":
        counts = [True, *counts]
    if len(counts) != len(messages):
        wrong(f"`{key}` has {len(counts)} entries, and there are {len(messages)} messages", hint=_unless(key))
    if isinstance(parsed, Exchange):
        return parsed if counts[-1] else empty(f"`{key}` ends with 0: nothing of the record counts in the loss")
    pairs = zip(messages, counts, strict=True)
    return replace(parsed, messages=tuple(one if is_in else one._replace(loss=False) for one, is_in in pairs))


def _flag(value: Any, path: str, key: str) -> bool:
    """Whether a flag is 1 or true; raises RecordError where it is not 0 or false either."""
    if not isinstance(value, (bool, int, float)):
        wrong(f"`{path}` is {json_type(value)}, expected 0 or 1", hint=_unless(key))
    if value not in (0, 1):
        unsupported(f"`{path}` is {value}, expected 0 or 1", hint=f"a token counts in the loss or not; {_unless(key)}")
    return bool(value)


def _refuse_either(path: str) -> None:
    unsupported(
        f"`{path}` says what counts in the loss, or what does not: programs differ",
        hint="name it `loss_mask` if 1 means that it counts, `masked` if 1 means that it does not; " + _unless(path),
    )


def _unless(key: str) -> str:
    return f"if it means another thing: {ignoring(key)}"
