"""What the schemas share: a key of a record, checked, and which messages count in the loss."""

from __future__ import annotations

from typing import Any, TypeVar

from chunkplan.errors import DataError
from chunkplan.intake.jsonl import json_type

T = TypeVar("T", str, bool, list[Any], dict[str, Any])

_EXPECTED = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}

HINT = "mend this record, or leave it out"

#: Names under which datasets write that a message counts in the loss (1) or does not (0).
_WEIGHTS = ("loss_weight", "weight")


def field(record: dict[str, Any], key: str, kind: type[T], where: str, *, inside: str = "") -> T:
    """`record[key]`, which has to be of `kind`; `inside` is the path of `record` within the line's record.

    Raises:
        DataError: it is missing or of another type.
    """
    path = f"{inside}.{key}" if inside else key
    if key not in record:
        raise DataError(f"`{path}` is missing, expected {_EXPECTED[kind]}", where=where, hint=HINT)
    return typed(record[key], kind, where, path)


def typed(value: Any, kind: type[T], where: str, path: str) -> T:
    """`value`, found at `path`, which has to be of `kind`.

    Raises:
        DataError: it is of another type.
    """
    if not isinstance(value, kind):
        raise DataError(f"`{path}` is {json_type(value)}, expected {_EXPECTED[kind]}", where=where, hint=HINT)
    return value


def counts_in_loss(message: dict[str, Any], role: str, where: str, path: str) -> bool:
    """Whether a message counts in the loss: as its `loss` or `loss_weight` says, else if the assistant wrote it.

    Raises:
        DataError: `loss` is not a boolean, or a weight is neither 0 nor 1.
    """
    if message.get("loss") is not None:
        return field(message, "loss", bool, where, inside=path)
    for key in _WEIGHTS:
        weight = message.get(key)
        if weight is None:
            continue
        if isinstance(weight, (str, list, dict)) or weight not in (0, 1):
            found = weight if isinstance(weight, (int, float)) else json_type(weight)
            raise DataError(
                f"`{path}.{key}` is {found}, expected 0 or 1", where=where, hint="a token counts in the loss or not"
            )
        return bool(weight)
    return role == "assistant"


#: Keys of a message that are meant for us and not for a chat template.
LOSS_KEYS = ("loss", *_WEIGHTS)


def tools(record: dict[str, Any], where: str) -> list[Any] | None:
    """The tools that a chat template may describe to the model.

    Raises:
        DataError: `tools` is there and not a list.
    """
    return field(record, "tools", list, where) if record.get("tools") is not None else None
