"""What a message says about its loss."""

from __future__ import annotations

from typing import Any

from chunkplan.intake.schemas.fields import json_type, unsupported, wrong

#: Keys of a message that are meant for the training and not for a chat template.
LOSS_KEYS = frozenset({"loss", "loss_weight", "weight"})


def stated_loss(message: dict[str, Any], path: str) -> bool | None:
    """Whether a message counts in the loss, as its `loss`, `loss_weight` or `weight` says; None where they say nothing.

    Raises:
        RecordError: what they say is neither yes nor no, or they disagree.
    """
    said: dict[str, bool] = {}
    for key in ("loss", "loss_weight", "weight"):
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)):
            wrong(f"`{path}.{key}` is {json_type(value)}, expected 0 or 1")
        if value not in (0, 1):
            unsupported(f"`{path}.{key}` is {value}, expected 0 or 1", hint="a token counts in the loss or not")
        said[key] = bool(value)
    if len(set(said.values())) > 1:
        wrong(f"`{path}` says with {' and '.join(f'`{key}`' for key in said)} both that it counts and that it does not")
    return next(iter(said.values()), None)
