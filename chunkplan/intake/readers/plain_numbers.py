"""Finds whole numbers, and lists of them, in JSON lines without decoding the lines.

This knows a small part of JSON and answers for it exactly: a line is *plain* if it is one object of at most 16 distinct
keys, whose strings are printable ASCII without escapes, and whose numbers are whole with at most 9 digits, so that they
fit int32. Of every other line, right or wrong, it says only that it is not plain.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import Int32Array, Int64Array, UInt8Array
from chunkplan.compiled import compiled

_MAX_KEYS = 16
_MAX_DIGITS = 9

#: Different keys of a block that are counted beside those that are wanted: bits of a whole number.
MAX_OTHERS = 62

_TAB, _CR, _SPACE, _QUOTE, _COMMA, _MINUS, _ZERO, _NINE, _COLON = 0x09, 0x0D, 0x20, 0x22, 0x2C, 0x2D, 0x30, 0x39, 0x3A
_OPEN_LIST, _BACKSLASH, _CLOSE_LIST, _OPEN, _CLOSE, _DELETE = 0x5B, 0x5C, 0x5D, 0x7B, 0x7D, 0x7F


class Keys(NamedTuple):
    """Keys whose values are wanted: the k-th is bytes [stops[k - 1], stops[k]) of `text` uint8."""

    text: UInt8Array
    stops: Int64Array


class Strings(NamedTuple):
    """Room for strings of a block: the i-th is sizes[i] bytes from byte starts[i] on, both int64."""

    starts: Int64Array
    sizes: Int64Array


@compiled
def find_numbers(
    block: UInt8Array,
    starts: Int64Array,
    stops: Int64Array,
    keys: Keys,
    are_lists: bool,
    first: Int64Array,
    counts: Int64Array,
    others: Strings,
    has_other: Int64Array,
) -> int:
    """Find where the values of some keys are in lines [starts[i], stops[i]) of `block`.

    The value of a key has to be a list of numbers if `are_lists`, else one number. On return `first[i, k]` is where in
    the block the first number of the k-th key may be, and `counts[i, k]` how many there are; `first` is -1 for a key
    that is not there, and for all keys of a line that is not plain. There may be more `keys` than `first` has columns:
    a line with one of those is not plain either.

    Returns how many different other keys there are. They are written into `others`, which has room for `MAX_OTHERS`,
    and bit i of has_other[line] says that a line has the i-th. A line with more is not plain.
    """
    seen = Strings(np.empty(_MAX_KEYS, np.int64), np.empty(_MAX_KEYS, np.int64))  # keys of a line
    num_others = 0
    for line in range(len(starts)):
        first[line, :] = -1
        counts[line, :] = 0
        stop = stops[line]
        at = _skip_space(block, starts[line], stop)
        num_keys = bits = 0
        is_plain = False
        expected = _OPEN
        while at < stop and block[at] == expected:
            expected = _COMMA
            at = _skip_space(block, at + 1, stop)
            if at >= stop or block[at] != _QUOTE or num_keys == _MAX_KEYS:
                break
            start = at + 1
            at = _skip_string(block, start, stop)
            if at < 0:
                break
            size = at - 1 - start
            if _find(block, start, size, seen, num_keys) < num_keys:
                break
            seen.starts[num_keys], seen.sizes[num_keys] = start, size
            num_keys += 1
            at = _skip_space(block, at, stop)
            if at >= stop or block[at] != _COLON:
                break
            at = _skip_space(block, at + 1, stop)
            key = _index_of(block, start, size, keys)
            if key >= first.shape[1]:
                break
            if key >= 0:
                first[line, key], counts[line, key], at = _skip_numbers(block, at, stop, are_lists)
            else:
                other = _find(block, start, size, others, num_others)
                if other == MAX_OTHERS:
                    break
                others.starts[other], others.sizes[other] = start, size
                num_others = max(num_others, other + 1)
                bits |= 1 << other
                at = _skip_scalar(block, at, stop)
            if at < 0:
                break
            at = _skip_space(block, at, stop)
            if at < stop and block[at] == _CLOSE:
                is_plain = _skip_space(block, at + 1, stop) == stop
                break
        if not is_plain:
            first[line, :] = -1
            counts[line, :] = bits = 0
        has_other[line] = bits
    return num_others


@compiled
def _skip_scalar(block: UInt8Array, at: int, stop: int) -> int:
    """The place behind a string or a whole number; -1 if it is neither, or not plain."""
    if at < stop and block[at] == _QUOTE:
        return _skip_string(block, at + 1, stop)
    return _skip_number(block, at, stop)


@compiled
def _skip_numbers(block: UInt8Array, at: int, stop: int, are_lists: bool) -> tuple[int, int, int]:
    """Where the first number of a value may be, how many there are, and the place behind it or -1: not plain."""
    if not are_lists:
        return at, 1, _skip_number(block, at, stop)
    if at >= stop or block[at] != _OPEN_LIST:
        return -1, 0, -1
    behind, count = _skip_list(block, at + 1, stop)
    return at + 1, count, behind


@compiled
def read_numbers(block: UInt8Array, first: Int64Array, counts: Int64Array, out: Int32Array) -> None:
    """The counts[i] numbers that `find_numbers` found at first[i], of all i, one after another into `out` int32."""
    index = 0
    for run in range(len(first)):
        at = first[run]
        for _ in range(counts[run]):
            while block[at] < _MINUS or block[at] > _NINE:  # brackets, commas and spaces; never `.` or `/`
                at += 1
            is_negative = block[at] == _MINUS
            if is_negative:
                at += 1
            number = 0
            while block[at] >= _ZERO and block[at] <= _NINE:  # a number is never the last byte of a line
                number = 10 * number + (block[at] - _ZERO)
                at += 1
            out[index] = -number if is_negative else number
            index += 1


@compiled
def _skip_space(block: UInt8Array, at: int, stop: int) -> int:
    """The place of the first byte from `at` on that is no space."""
    while at < stop and (block[at] == _SPACE or block[at] == _TAB or block[at] == _CR):
        at += 1
    return at


@compiled
def _skip_string(block: UInt8Array, at: int, stop: int) -> int:
    """The place behind the quote that ends a string; -1 if it is not plain."""
    while at < stop:
        byte = block[at]
        if byte == _QUOTE:
            return at + 1
        if byte < _SPACE or byte >= _DELETE or byte == _BACKSLASH:
            return -1
        at += 1
    return -1


@compiled
def _skip_number(block: UInt8Array, at: int, stop: int) -> int:
    """The place behind a whole number; -1 if there is none, or not a plain one. -0 is not."""
    is_negative = at < stop and block[at] == _MINUS
    if is_negative:
        at += 1
    start = at
    while at < stop and block[at] >= _ZERO and block[at] <= _NINE:
        at += 1
    num_digits = at - start
    if num_digits == 0 or num_digits > _MAX_DIGITS:
        return -1
    if block[start] == _ZERO and (is_negative or num_digits > 1):
        return -1
    return at


@compiled
def _skip_list(block: UInt8Array, at: int, stop: int) -> tuple[int, int]:
    """The place behind a list of whole numbers, and how many there are; (-1, 0) if it is not plain."""
    at = _skip_space(block, at, stop)
    if at < stop and block[at] == _CLOSE_LIST:
        return at + 1, 0
    count = 0
    while True:
        at = _skip_number(block, _skip_space(block, at, stop), stop)
        if at < 0:
            return -1, 0
        count += 1
        at = _skip_space(block, at, stop)
        if at < stop and block[at] == _CLOSE_LIST:
            return at + 1, count
        if at >= stop or block[at] != _COMMA:
            return -1, 0
        at += 1


@compiled
def _find(block: UInt8Array, start: int, size: int, strings: Strings, num_strings: int) -> int:
    """Which of the first `num_strings` strings that of `size` bytes at `start` is; `num_strings`: none."""
    for index in range(num_strings):
        if strings.sizes[index] == size:
            num_same = 0
            while num_same < size and block[strings.starts[index] + num_same] == block[start + num_same]:
                num_same += 1
            if num_same == size:
                return index
    return num_strings


@compiled
def _index_of(block: UInt8Array, start: int, size: int, keys: Keys) -> int:
    """Which of `keys` the string of `size` bytes at `start` is; -1: none."""
    key_start = 0
    for key in range(len(keys.stops)):
        if keys.stops[key] - key_start == size:
            num_same = 0
            while num_same < size and keys.text[key_start + num_same] == block[start + num_same]:
                num_same += 1
            if num_same == size:
                return key
        key_start = keys.stops[key]
    return -1
