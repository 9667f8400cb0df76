"""Target masks of byte-level tokenizers, from how many bytes every token is: far cheaper than asking for offsets.

The tokens of such a tokenizer, one after another, are the bytes of the text. A token begins in a character at or after
character c exactly where it begins at or after the first byte of c, since one that begins within a character begins
before the next.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.intake.template_spans import Span


def first_bytes(text: str, places: Iterable[int]) -> tuple[list[int], int]:
    """The byte at which each character of `places` (ascending) begins in UTF-8, and the bytes of all of `text`."""
    if text.isascii():
        return list(places), len(text)
    found, counted, num_bytes = [], 0, 0
    for place in places:
        num_bytes += len(text[counted:place].encode())
        counted = place
        found.append(num_bytes)
    return found, num_bytes + len(text[counted:].encode())


def starts_in_bytes(input_ids: Int32Array, num_bytes: Int64Array, total: int) -> Int64Array | None:
    """The byte at which every token begins, ascending; None if the tokens are not `total` bytes together.

    `num_bytes` is how many each token of the vocabulary is.
    """
    lengths = num_bytes.take(input_ids)
    stops = lengths.cumsum()
    if (int(stops[-1]) if len(stops) else 0) != total:
        return None
    starts: Int64Array = stops - lengths
    return starts


def mask_from(input_ids: Int32Array, num_bytes: Int64Array, text: str, place: int) -> BoolArray | None:
    """Which tokens of `text` begin at character `place` or later; None where bytes do not say."""
    [border], total = first_bytes(text, [place])
    starts = starts_in_bytes(input_ids, num_bytes, total)
    return None if starts is None else starts >= border


def mask_in(input_ids: Int32Array, num_bytes: Int64Array, text: str, spans: list[Span]) -> BoolArray | None:
    """Which tokens of `text` begin in one of `spans`, ordered and disjoint; None where bytes do not say."""
    borders, total = first_bytes(text, (place for span in spans for place in span))
    starts = starts_in_bytes(input_ids, num_bytes, total)
    if starts is None:
        return None
    mask = np.zeros(len(input_ids), np.bool_)
    places = starts.searchsorted(borders).tolist()
    for start, stop in zip(places[::2], places[1::2], strict=True):
        mask[start:stop] = True
    return mask
