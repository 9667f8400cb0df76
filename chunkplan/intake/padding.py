"""Padding among tokens that nothing marks as padding: sequences that would be trained on it are left out."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array, offsets_of
from chunkplan.intake.pieces import TokenColumns
from chunkplan.intake.rejection import Rejected
from chunkplan.intake.tokenizer import RecordTokenizer

#: Words in the name of a token that may end a text, of which only what comes behind the first is padding.
_ENDS = ("end", "eos", "eot", "/s")

_HINT = "give `attention_mask` with 0 at padding, or `labels` with -100 there; or leave the padding out"


def without_padded(
    numbers: Int64Array, found: TokenColumns, tokenizer: RecordTokenizer | None
) -> tuple[Int64Array, TokenColumns, list[Rejected]]:
    """The sequences, of the records `numbers` [m], without padding among their targets, and what is wrong with others.

    Padding is a run of the tokenizer's padding token, or of its end token, at either end of a sequence.
    """
    if tokenizer is None or not len(numbers):
        return numbers, found, []
    first, last = found.offsets[:-1], found.offsets[1:] - 1
    second, before = np.minimum(first + 1, last), np.maximum(last - 1, first)
    pads = dict(pad for pad in (tokenizer.pad, tokenizer.eos) if pad is not None)
    is_bad, names = np.zeros(len(first), np.bool_), list[str]()
    for name, pad_id in pads.items():
        is_pad = found.input_ids == pad_id
        ends_text = (name, pad_id) == tokenizer.eos or any(word in name.lower() for word in _ENDS)
        is_its = is_pad[last] & found.target[last] & (is_pad[before] | (not ends_text))
        is_its |= is_pad[first] & is_pad[second] & found.target[second]
        names += [f"`{name}`"] if is_its.any() else []
        is_bad |= is_its
    if not is_bad.any():
        return numbers, found, []
    message = (
        f"it begins or ends with padding ({' or '.join(names)}) that counts in the loss, as nothing marks it as padding"
    )
    rejected = [Rejected(number, "schema", message, _HINT) for number in numbers[is_bad].tolist()]
    kept, lengths = np.repeat(~is_bad, np.diff(found.offsets)), np.diff(found.offsets)[~is_bad]
    columns = TokenColumns(offsets_of(lengths), found.input_ids[kept], found.target[kept])
    return numbers[~is_bad], columns, rejected
