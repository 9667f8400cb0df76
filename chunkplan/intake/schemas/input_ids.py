"""`input_ids`, perhaps with `labels` and `attention_mask`: records that are tokens already."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from chunkplan.arrays import Int32Array
from chunkplan.intake.records import JsonObject, TokensRecord
from chunkplan.intake.schemas.fields import empty, json_type, quoted, wrong
from chunkplan.intake.schemas.layout import Schema

#: The label of a token that is no target.
IGNORED = -100


def parse(record: JsonObject, columns: dict[str, str]) -> TokensRecord:
    """Labels stand at the place of the token they are for, not shifted; zeros at the ends of the mask are padding.

    Raises:
        RecordError: these are not lists of whole numbers of one length, a label is of another token, a mask has holes,
            or there are no tokens.
    """
    key = columns["input_ids"]
    if key not in record:
        wrong(f"`{key}` is missing, expected a list of token ids, found the keys {quoted(record)}")
    input_ids = _numbers(record[key], key)
    if not len(input_ids):
        empty(f"`{key}` has no tokens")
    if input_ids.min() < 0:
        wrong(f"`{key}[{int(input_ids.argmin())}]` is {input_ids.min()}, expected a token id")
    target = np.ones(len(input_ids), np.bool_)
    labels_key = columns["labels"]
    if record.get(labels_key) is not None:
        labels = _numbers(record[labels_key], labels_key)
        _check_length(labels, labels_key, input_ids, key)
        target = labels != IGNORED
        other = np.flatnonzero(target & (labels != input_ids))
        if other.size:
            place = int(other[0])
            wrong(
                f"`{labels_key}[{place}]` is {labels[place]} and `{key}[{place}]` is {input_ids[place]}, "
                f"expected the same or {IGNORED}",
                hint="labels stand at the place of the token they are for: do not shift them",
            )
    mask_key = columns["attention_mask"]
    if record.get(mask_key) is not None:
        mask = _numbers(record[mask_key], mask_key)
        _check_length(mask, mask_key, input_ids, key)
        start, stop = _extent(mask, mask_key)
        input_ids, target = input_ids[start:stop], target[start:stop]
    target[0] = False  # nothing predicts the first token
    return TokensRecord(input_ids, target)


def _numbers(values: Any, path: str) -> Int32Array:
    """The whole numbers of 32 bits in the list `values`, found at `path`: int32 [n]."""
    if type(values) is not list:
        wrong(f"`{path}` is {json_type(values)}, expected a list of whole numbers")
    kinds = set(map(type, values))
    if kinds <= {int}:
        try:
            return np.frombuffer(array("i", values), np.int32).copy()
        except OverflowError:
            place = next(index for index, value in enumerate(values) if not -(2**31) <= value < 2**31)
            wrong(f"`{path}[{place}]` is {values[place]}, which is more than 32 bits")
    place = next(index for index, value in enumerate(values) if type(value) is not int)
    return wrong(f"`{path}[{place}]` is {json_type(values[place])}, expected a whole number")


def _check_length(values: Int32Array, path: str, input_ids: Int32Array, key: str) -> None:
    if len(values) != len(input_ids):
        wrong(f"`{path}` has {len(values)} entries and `{key}` has {len(input_ids)}")


def _extent(mask: Int32Array, path: str) -> tuple[int, int]:
    """The range [start, stop) of the ones of a mask."""
    ones = np.flatnonzero(mask)
    if not ones.size:
        empty(f"`{path}` is all 0")
    wrong_value = np.flatnonzero((mask != 0) & (mask != 1))
    if wrong_value.size:
        wrong(f"`{path}[{int(wrong_value[0])}]` is {mask[wrong_value[0]]}, expected 0 or 1")
    start, stop = int(ones[0]), int(ones[-1]) + 1
    if ones.size != stop - start:
        hole = start + int(np.flatnonzero(mask[start:stop] == 0)[0])
        wrong(f"`{path}[{hole}]` is 0 between ones: only padding at the ends can be left out")
    return start, stop


SCHEMA = Schema({"input_ids": ("input_ids",)}, parse, {"labels": ("labels",), "attention_mask": ("attention_mask",)})
