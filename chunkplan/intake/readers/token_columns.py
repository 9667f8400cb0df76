"""Lists of token ids -> token columns, where nothing is wrong with them."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array, offsets_of
from chunkplan.compiled import compiled
from chunkplan.intake.pieces import TokenColumns
from chunkplan.intake.readers.columns import Lists, PlainRows, join
from chunkplan.intake.schemas import RecordLayout

#: A label that is no target.
_NO_TARGET = -100


def plain_tokens(input_ids: Lists, labels: Lists, attention_mask: Lists, layout: RecordLayout) -> PlainRows:
    """Token ids of n rows. Labels are not shifted; what the mask has 0 for at either end is padding, and left out."""
    num_rows = len(input_ids.present)
    for role, lists in (("labels", labels), ("attention_mask", attention_mask)):
        if layout.marks is not None:  # all records have them, or none
            is_expected = lists.present == (layout.columns[role] in layout.marks)
            input_ids = input_ids._replace(present=input_ids.present & is_expected)
    starts, stops = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    _find_tokens(input_ids, labels, attention_mask, starts, stops)
    taken = stops > starts
    lengths = stops - starts
    offsets = offsets_of(lengths)
    # All ids, and for every one of them a label, or none: lists of rows that are not taken would make them differ.
    are_like_ids = np.array_equal(labels.offsets, input_ids.offsets)
    if offsets[-1] == len(input_ids.values) and (are_like_ids or not len(labels.values)):
        ids = input_ids.values
        target = labels.values != _NO_TARGET if len(labels.values) else np.ones(len(ids), np.bool_)
    else:
        runs = list(zip((input_ids.offsets[:-1] + starts).tolist(), lengths.tolist(), strict=True))
        ids = join([input_ids.values[start : start + length] for start, length in runs], input_ids.values.dtype)
        target = np.ones(len(ids), np.bool_)
        for row in np.flatnonzero(taken & labels.present).tolist():
            start = labels.offsets[row] + starts[row]
            target[offsets[row] : offsets[row + 1]] = labels.values[start : start + lengths[row]] != _NO_TARGET
    offsets = np.concatenate([[0], offsets[1:][taken]])
    target[offsets[:-1]] = False
    return PlainRows(taken, TokenColumns(offsets, ids, target, np.ones(len(offsets) - 1, np.int64)))


@compiled
def _find_tokens(input_ids: Lists, labels: Lists, attention_mask: Lists, starts: Int64Array, stops: Int64Array) -> None:
    """Write which tokens of every row count: [starts[i], stops[i]) without padding; left 0 for a row that is not plain.

    `starts` and `stops` are zeros int64 [num_rows].
    """
    for row in range(len(starts)):
        ids = input_ids.values[input_ids.offsets[row] : input_ids.offsets[row + 1]]  # [length]
        is_plain = input_ids.present[row] and len(ids) > 0
        low, high = 0, len(ids)
        for index in range(len(ids)):
            is_plain &= ids[index] >= 0
        if is_plain and labels.present[row]:
            own_labels = labels.values[labels.offsets[row] : labels.offsets[row + 1]]
            is_plain = len(own_labels) == len(ids)
            if is_plain:
                for index in range(len(ids)):
                    is_plain &= own_labels[index] == _NO_TARGET or own_labels[index] == ids[index]
        if is_plain and attention_mask.present[row]:
            mask = attention_mask.values[attention_mask.offsets[row] : attention_mask.offsets[row + 1]]
            is_plain = len(mask) == len(ids)
            if is_plain:
                while low < high and mask[low] == 0:
                    low += 1
                while low < high and mask[high - 1] == 0:
                    high -= 1
                for index in range(low, high):
                    is_plain &= mask[index] == 1
        if is_plain:
            starts[row], stops[row] = low, high
