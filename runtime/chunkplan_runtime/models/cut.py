"""A part of a model that runs by itself, while the model has the layers of other parts too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Cut:
    """One model stage of a model: only the first embeds tokens, only the last has final hidden states and a head.

    `layers`: those that its decoder has under `name` while this runs, its own and what stands for those of other parts;
    None: those that the decoder has anyway.
    """

    is_first: bool = True
    is_last: bool = True
    layers: nn.ModuleList | None = None
    name: str = "layers"

    @contextmanager
    def in_place(self, decoder: Any) -> Iterator[None]:
        """Within the block `decoder` has these layers.

        Otherwise it has those of all parts under their names, for whatever takes the model as a whole: optimizer,
        sharding, saving.
        """
        if self.layers is None:
            yield
            return
        of_all_parts = getattr(decoder, self.name)
        setattr(decoder, self.name, self.layers)
        try:
            yield
        finally:
            setattr(decoder, self.name, of_all_parts)
