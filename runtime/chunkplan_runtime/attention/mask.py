"""Which tokens of its sequence a layer lets a token see, as the model itself says by the mask that it makes.

transformers describes a mask by a function that is put together from a few (`masking_utils`), and lets an attention
implementation make of it what it needs. Here that is the description alone: borders of sequences and parts come from
the plan. So windows are those of the model's own code, which not every model takes from its config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from transformers import masking_utils


@dataclass(frozen=True)
class Mask:
    """A token sees those before it and itself; with `window` the last so many of them; all, unless it is `causal`.

    `tile`: it sees those in its own tile of the sequence, of so many tokens each. `unknown` is the name of what else
    there is to it, which the layers that get it are refused for.
    """

    window: int | None = None
    causal: bool = True
    tile: int | None = None
    unknown: str | None = None

    def __getitem__(self, kept: tuple[slice | int | None, ...]) -> Mask:
        """What is left of it where a model keeps some rows or columns: all of it if those are all."""
        is_whole = all(each in (slice(None), slice(0, None)) for each in kept)
        return self if is_whole else replace(self, unknown="what keeps a part of it")


#: Functions of `masking_utils` that say nothing new: borders of sequences, which the plan knows too.
_KNOWN = ("packed_sequence_mask_function", "remap_positions_for_packed_sequence", "and_masks")


#: Whether this thread is in a block of `borders_from_plan`.
_KNOWS_BORDERS: ContextVar[bool] = ContextVar("_KNOWS_BORDERS", default=False)

_FIND_BORDERS = masking_utils.find_packed_sequence_indices


@wraps(_FIND_BORDERS)
def _borders_unless_known(position_ids: torch.Tensor) -> torch.Tensor | None:
    return None if _KNOWS_BORDERS.get() else _FIND_BORDERS(position_ids)


@contextmanager
def borders_from_plan() -> Iterator[None]:
    """Within the block transformers looks for no borders of sequences in positions. Other threads are not concerned.

    It looks whether there are any, which waits for the device once for each kind of mask, and what it finds plays no
    part here.
    """
    masking_utils.find_packed_sequence_indices = _borders_unless_known
    before = _KNOWS_BORDERS.set(True)
    try:
        yield
    finally:
        _KNOWS_BORDERS.reset(before)


def mask_of(*, mask_function: Callable[..., Any], **_: Any) -> Mask:
    """The mask that a function of transformers describes.

    A mask of padding is not looked at: chunks have no padding, and where there is one, the model made it itself.
    """
    window, tile, causal, either = None, None, False, False
    for part in _parts(mask_function):
        name, _, _ = part.__qualname__.partition(".<locals>")
        if name == "or_masks":
            either = True
        elif either and part.__qualname__.endswith("<lambda>"):
            continue  # what it says is asked below
        elif name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":
            window = _enclosed(part)["sliding_window"]
        elif name == "chunked_overlay":
            tile = _enclosed(part)["chunk_size"]
        elif name not in (*_KNOWN, "bidirectional_mask_function", "padding_mask_function"):
            return Mask(unknown=name)
    if not either:
        return Mask(window, causal, tile)
    first, second = torch.arange(2)
    # One of two masks, of which one is causal: all see all, or it is not known what.
    return Mask(window, causal=False) if mask_function(0, 0, first, second) else Mask(unknown="or_masks")


def _parts(mask_function: Callable[..., Any]) -> Iterator[Any]:
    """A mask function, and all that it is put together from."""
    yield mask_function
    for enclosed in _enclosed(mask_function).values():
        for each in enclosed if isinstance(enclosed, tuple) else (enclosed,):
            if callable(each):
                yield from _parts(each)


def _enclosed(function: Any) -> Mapping[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
