"""A part of a model that runs by itself, while the model has the layers of other parts too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Cut:
    """One model stage of a model: only the first embeds tokens, only the last has final hidden states and a head.

    `layers`: its own, and what stands for those of other parts; None: all that the model has. `modules`: what the
    decoder has in place of its own while this runs, by name, the layers among them.
    """

    is_first: bool = True
    is_last: bool = True
    layers: nn.ModuleList | None = None
    modules: Mapping[str, nn.Module] = field(default_factory=dict)

    @contextmanager
    def in_place(self, decoder: Any) -> Iterator[None]:
        """Within the block `decoder` has the modules of this part.

        Otherwise it has those of all parts under their names, for whatever takes the model as a whole: optimizer,
        sharding, saving.
        """
        of_all_parts = {name: getattr(decoder, name) for name in self.modules}
        try:
            for name, module in self.modules.items():
                setattr(decoder, name, module)
            yield
        finally:
            for name, module in of_all_parts.items():
                setattr(decoder, name, module)
