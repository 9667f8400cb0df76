"""Lists of token ids -> token columns, where nothing is wrong with them."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, offsets_of
from chunkplan.compiled import compiled
from chunkplan.intake.pieces import TokenColumns
from chunkplan.intake.readers.columns import Lists, PlainRows, join

#: A label that is no target.
_NO_TARGET = -100


def plain_tokens(input_ids: Lists, labels: Lists, attention_mask: Lists) -> PlainRows:
    """Token ids of n rows. Labels are not shifted; what the mask has 0 for at either end is padding, and left out."""
    num_rows = len(input_ids.present)
    begin, end = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    _check_tokens(*input_ids, *labels, *attention_mask, begin, end)
    taken = end > begin
    lengths = end - begin
    offsets = offsets_of(lengths)
    # All ids, and for every one of them a label, or none: lists of rows that are not taken would make them differ.
    are_like_ids = np.array_equal(labels.offsets, input_ids.offsets)
    if offsets[-1] == len(input_ids.values) and (are_like_ids or not len(labels.values)):
        ids = input_ids.values
        target = labels.values != _NO_TARGET if len(labels.values) else np.ones(len(ids), np.bool_)
    else:
        runs = list(zip((input_ids.offsets[:-1] + begin).tolist(), lengths.tolist(), strict=True))
        ids = join([input_ids.values[first : first + length] for first, length in runs], input_ids.values.dtype)
        target = np.ones(len(ids), np.bool_)
        for row in np.flatnonzero(taken & labels.present).tolist():
            first = labels.offsets[row] + begin[row]
            target[offsets[row] : offsets[row + 1]] = labels.values[first : first + lengths[row]] != _NO_TARGET
    offsets = np.concatenate([[0], offsets[1:][taken]])
    target[offsets[:-1]] = False
    return PlainRows(taken, TokenColumns(offsets, ids, target))


@compiled
def _check_tokens(
    ids: Int32Array,
    id_offsets: Int64Array,
    has_ids: BoolArray,
    labels: Int32Array,
    label_offsets: Int64Array,
    has_labels: BoolArray,
    mask: Int32Array,
    mask_offsets: Int64Array,
    has_mask: BoolArray,
    begin: Int64Array,
    end: Int64Array,
) -> None:
    """Which tokens of every row count: [begin[i], end[i]) without padding; both 0 for a row that is not plain."""
    for row in range(len(begin)):
        first = id_offsets[row]
        length = id_offsets[row + 1] - first
        is_plain = has_ids[row] and length > 0
        low, high = 0, length
        for index in range(length):
            is_plain &= ids[first + index] >= 0
        if is_plain and has_labels[row]:
            other = label_offsets[row]
            is_plain = label_offsets[row + 1] - other == length
            if is_plain:
                for index in range(length):
                    label = labels[other + index]
                    is_plain &= label == _NO_TARGET or label == ids[first + index]
        if is_plain and has_mask[row]:
            other = mask_offsets[row]
            is_plain = mask_offsets[row + 1] - other == length
            if is_plain:
                while low < high and mask[other + low] == 0:
                    low += 1
                while low < high and mask[other + high - 1] == 0:
                    high -= 1
                for index in range(low, high):
                    is_plain &= mask[other + index] == 1
        if is_plain:
            begin[row], end[row] = low, high
