"""What an optimizer remembers of each weight that it changes."""

from __future__ import annotations

from typing import Literal

Optimizer = Literal["adamw", "adamw-8bit", "sgd", "adafactor"]

#: Of moments in 8 bits as many have a scale in float32 in common (Dettmers et al., arXiv 2110.02861).
BLOCK = 256

#: Bytes of a weight: two moments in float32; two of 8 bits with their scales; nothing; two vectors of a matrix, which
#: are too little to count.
MOMENT_BYTES: dict[Optimizer, float] = {
    "adamw": 8.0,
    "adamw-8bit": 2 * (1 + 4 / BLOCK),
    "sgd": 0.0,
    "adafactor": 0.0,
}

OPTIMIZERS: tuple[Optimizer, ...] = tuple(MOMENT_BYTES)

#: Those that change each number by what is known of it alone, and so work on any part of a matrix.
ELEMENTWISE: tuple[Optimizer, ...] = ("adamw", "adamw-8bit", "sgd")


def moment_bytes(optimizer: Optimizer, hidden_size: int) -> float:
    """What is remembered of a weight: of rows that are no whole blocks float32, as the trainer keeps them."""
    return MOMENT_BYTES["adamw" if optimizer == "adamw-8bit" and hidden_size % BLOCK else optimizer]
