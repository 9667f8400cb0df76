"""Target masks of byte-level tokenizers, from how many bytes every token is: far cheaper than asking for offsets.

The tokens of such a tokenizer, one after another, are the bytes of the text, so a token holds a character of a span
where it has a byte of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.intake.template_render import Span


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


def mask_in(
    input_ids: Int32Array, num_bytes: Int64Array, text: str, spans: list[Span]
) -> tuple[BoolArray, bool] | None:
    """Which tokens of `text` hold a character of one of `spans`, ordered, disjoint and not empty.

    And whether one of them begins before its span. None where bytes do not say.
    """
    borders, total = first_bytes(text, (place for span in spans for place in span))
    starts = starts_in_bytes(input_ids, num_bytes, total)
    if starts is None:
        return None
    mask = np.zeros(len(input_ids), np.bool_)
    places = starts.searchsorted(borders).tolist()
    shares = False
    for start, stop, border in zip(places[::2], places[1::2], borders[::2], strict=True):
        first = start
        if (starts[start] if start < len(starts) else total) > border:  # the token before it reaches into the span
            first -= 1
            shares = shares or not mask[first]
        mask[first:stop] = True
    return mask, shares
