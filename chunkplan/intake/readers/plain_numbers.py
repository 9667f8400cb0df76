"""Finds whole numbers, and lists of them, in JSON lines without decoding the lines.

This knows a small part of JSON and answers for it exactly: a line is *plain* if it is one object of at most 16 distinct
keys, whose strings are printable ASCII without escapes, and whose numbers are whole with at most 9 digits, so that they
fit int32. Of every other line, right or wrong, it says only that it is not plain.
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int32Array, Int64Array, UInt8Array
from chunkplan.compiled import compiled

_MAX_KEYS = 16
_MAX_DIGITS = 9

#: Different keys of a block that are told apart beside those that are wanted: bits of a whole number.
MAX_OTHERS = 62

_TAB, _CR, _SPACE, _QUOTE, _COMMA, _MINUS, _ZERO, _NINE, _COLON = 0x09, 0x0D, 0x20, 0x22, 0x2C, 0x2D, 0x30, 0x39, 0x3A
_OPEN_LIST, _BACKSLASH, _CLOSE_LIST, _OPEN, _CLOSE, _DELETE = 0x5B, 0x5C, 0x5D, 0x7B, 0x7D, 0x7F


@compiled
def find_numbers(
    block: UInt8Array,
    starts: Int64Array,
    stops: Int64Array,
    keys: UInt8Array,
    key_stops: Int64Array,
    are_lists: bool,
    first: Int64Array,
    counts: Int64Array,
    other_first: Int64Array,
    other_size: Int64Array,
    others: Int64Array,
) -> int:
    """Find where the values of some keys are in lines [starts[i], stops[i]) of `block`.

    The k-th key is bytes [key_stops[k - 1], key_stops[k]) of `keys`; its value has to be a list of numbers if
    `are_lists`, else one number. On return `first[i, k]` is where in the block its first number may be, and
    `counts[i, k]` how many there are; `first` is -1 for a key that is not there, and for all keys of a line that is not
    plain. There may be more `keys` than `first` has columns: a line with one of those is not plain either.

    Returns how many different other keys there are. They are bytes from other_first[i] of the block, other_size[i] of
    them, and bit i of others[line] says that a line has the i-th. A line with more than `MAX_OTHERS` is not plain.
    """
    num_others = 0
    key_first = np.empty(_MAX_KEYS, np.int64)
    key_size = np.empty(_MAX_KEYS, np.int64)
    for line in range(len(starts)):
        first[line, :] = -1
        counts[line, :] = 0
        others[line] = 0
        stop = stops[line]
        at = _skip_space(block, starts[line], stop)
        num_keys = 0
        is_plain = False
        expected = _OPEN
        while at < stop and block[at] == expected:
            expected = _COMMA
            at = _skip_space(block, at + 1, stop)
            if at >= stop or block[at] != _QUOTE or num_keys == _MAX_KEYS:
                break
            begin = at + 1
            at = _skip_string(block, begin, stop)
            if at < 0:
                break
            size = at - 1 - begin
            if _find(block, begin, size, key_first, key_size, num_keys) < num_keys:
                break
            key_first[num_keys] = begin
            key_size[num_keys] = size
            num_keys += 1
            at = _skip_space(block, at, stop)
            if at >= stop or block[at] != _COLON:
                break
            at = _skip_space(block, at + 1, stop)
            key = _index_of(block, begin, size, keys, key_stops)
            if key >= first.shape[1]:
                break
            if key < 0:
                other = _find(block, begin, size, other_first, other_size, num_others)
                if other == MAX_OTHERS:
                    break
                if other == num_others:
                    other_first[other] = begin
                    other_size[other] = size
                    num_others += 1
                others[line] |= 1 << other
            if key >= 0 and are_lists:
                if at >= stop or block[at] != _OPEN_LIST:
                    break
                first[line, key] = at + 1
                at, counts[line, key] = _skip_list(block, at + 1, stop)
            elif key >= 0:
                first[line, key] = at
                counts[line, key] = 1
                at = _skip_number(block, at, stop)
            elif at < stop and block[at] == _QUOTE:
                at = _skip_string(block, at + 1, stop)
            else:
                at = _skip_number(block, at, stop)
            if at < 0:
                break
            at = _skip_space(block, at, stop)
            if at < stop and block[at] == _CLOSE:
                is_plain = _skip_space(block, at + 1, stop) == stop
                break
        if not is_plain:
            first[line, :] = -1
            counts[line, :] = 0
            others[line] = 0
    return num_others


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
    while at < stop and (block[at] == _SPACE or block[at] == _TAB or block[at] == _CR):
        at += 1
    return at


@compiled
def _skip_string(block: UInt8Array, at: int, stop: int) -> int:
    """Behind the quote that ends a string; -1 if it is not plain."""
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
    """Behind a whole number; -1 if there is none, or not a plain one. -0 is not."""
    is_negative = at < stop and block[at] == _MINUS
    if is_negative:
        at += 1
    begin = at
    while at < stop and block[at] >= _ZERO and block[at] <= _NINE:
        at += 1
    num_digits = at - begin
    if num_digits == 0 or num_digits > _MAX_DIGITS:
        return -1
    if block[begin] == _ZERO and (is_negative or num_digits > 1):
        return -1
    return at


@compiled
def _skip_list(block: UInt8Array, at: int, stop: int) -> tuple[int, int]:
    """Behind the bracket that ends a list of whole numbers, and how many there are; (-1, 0) if it is not plain."""
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
def _find(block: UInt8Array, begin: int, size: int, key_first: Int64Array, key_size: Int64Array, num_keys: int) -> int:
    """Which of the first `num_keys` keys the string of `size` bytes at `begin` is; `num_keys`: none."""
    for key in range(num_keys):
        if key_size[key] == size:
            index = 0
            while index < size and block[key_first[key] + index] == block[begin + index]:
                index += 1
            if index == size:
                return key
    return num_keys


@compiled
def _index_of(block: UInt8Array, begin: int, size: int, keys: UInt8Array, key_stops: Int64Array) -> int:
    """Which of `keys` the string of `size` bytes at `begin` is; -1: none."""
    key_start = 0
    for key in range(len(key_stops)):
        if key_stops[key] - key_start == size:
            index = 0
            while index < size and keys[key_start + index] == block[begin + index]:
                index += 1
            if index == size:
                return key
        key_start = key_stops[key]
    return -1
