"""`input_ids`, perhaps with `labels`, masks, positions and the like: records that are tokens already."""

from __future__ import annotations

import shlex
from array import array
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from chunkplan.arrays import Int32Array
from chunkplan.intake.records import JsonObject, TokensRecord
from chunkplan.intake.schemas.fields import empty, json_type, quoted, words_of, wrong
from chunkplan.intake.schemas.key_kinds import is_number, may_mark
from chunkplan.intake.schemas.layout import Schema
from chunkplan.intake.schemas.loss_flags import COUNTS
from chunkplan.intake.schemas.marks import refuse_unread
from chunkplan.intake.schemas.token_marks import FOR_EACH, ONLY_LISTS, TOKEN_MARKS, read_marks

#: Lists of tokenizers that say nothing of what is learnt.
HARMLESS = ("special_tokens_mask", "token_type_ids")

#: A number says which tokens are a prompt if its name has a word of both.
_PARTS = {"prompt", "source", "src", "context", "answer", "completion", "response", "instruction"}
_PLACES = {"length", "len", "token", "start", "end", "idx", "index", "num", "size", "offset"}

_ROLES = {key: role for role, keys in TOKEN_MARKS.items() for key in keys}


def parse(record: JsonObject, columns: dict[str, str]) -> TokensRecord:
    """Labels and masks stand at the place of the token they are for, not shifted; what is padding is left out.

    Raises:
        RecordError: these are not lists of whole numbers of one length, they contradict each other, another key may say
            what counts, or there are no tokens.
    """
    key = columns["input_ids"]
    if key not in record:
        wrong(f"`{key}` is missing, expected a list of token ids, found the keys {quoted(record)}")
    input_ids = _numbers(record[key], key)
    if not len(input_ids):
        empty(f"`{key}` has no tokens")
    if input_ids.min() < 0:
        wrong(f"`{key}[{int(input_ids.argmin())}]` is {input_ids.min()}, expected a token id")
    marks: dict[str, dict[str, Int32Array]] = {}
    for name, role in marks_of(record, columns).items():
        numbers = _numbers(record[name], name, is_mask=role.endswith("mask"))
        if role in FOR_EACH and len(numbers) != len(input_ids):
            wrong(f"`{name}` has {len(numbers)} entries and `{key}` has {len(input_ids)}")
        marks.setdefault(role, {})[name] = numbers
    for name in record.keys() - {key, *HARMLESS, *(name for names in marks.values() for name in names)}:
        _refuse_mark(name, record[name], input_ids, marks)
    start, stop, begins, target = read_marks(key, input_ids, marks)
    return TokensRecord(input_ids[start:stop], target[start:stop], begins - start)


def marks_of(record: JsonObject, columns: Mapping[str, str]) -> dict[str, str]:
    """The keys of `record` that say something of its tokens, each with its role: those of `columns` and usual ones."""
    roles = _ROLES | {key: role for role, key in columns.items() if role in TOKEN_MARKS}
    return {
        key: roles[key]
        for key, value in record.items()
        if key in roles and value is not None and (roles[key] not in ONLY_LISTS or _is_list(value))
    }


def refuse_mixed(record: JsonObject, columns: Mapping[str, str], expected: Collection[str]) -> None:
    """Raises RecordError where other keys say something of the tokens of `record` than the `expected` of its source."""
    found = marks_of(record, columns)
    for key in (*(key for key in expected if key not in found), *(key for key in found if key not in expected)):
        has_not, has = f"`{key}` is missing or null, and other records have it", f"`{key}` is not in the first records"
        hint = "give it to all records of a file, or put those without it into another file"
        wrong(has_not if key in expected else has, hint)


def _refuse_mark(name: str, value: Any, input_ids: Int32Array, marks: Mapping[str, Any]) -> None:
    """Raises RecordError where `value`, which nothing reads, may say what is learnt of the tokens or how they part."""
    is_stated = not marks.keys().isdisjoint(("labels", "loss_mask", "prompt_mask"))
    if _is_split(name) and is_number(value) and not is_stated:
        refuse_unread(name, says="what may say which tokens are a prompt; `labels` or `loss_mask` would be read")
    if not _is_list(value):
        if may_mark(name) and is_number(value) and value != int(COUNTS.get(name, True)):
            refuse_unread(name, says="what may say how much the record counts")
        return
    values = value.tolist() if isinstance(value, np.ndarray) else value
    inner = [
        each for one in values if type(one) in (list, dict) for each in (one.values() if type(one) is dict else one)
    ]
    if any(type(one) is int for one in inner) and not is_stated:
        refuse_unread(name, says="numbers in lists or objects, which may be spans of tokens that count, or documents")
    kinds = set(map(type, values)) - {type(None)}
    if not kinds or not kinds <= {int, float, bool}:
        return
    if may_mark(name) or len(values) in (len(input_ids), len(input_ids) - 1):
        flags = [f"--column {shlex.quote(f'{role}={name}')}" for role in ("loss_mask", "prompt_mask")]
        ways = f"where 1 counts in the loss: {flags[0]}; where 1 does not: {flags[1]}; " if {*values} <= {0, 1} else ""
        refuse_unread(name, says="a number for each token, which may say what counts", ways=ways)
    if len(values) < 2 or set(map(type, values)) != {int}:
        return
    if len(input_ids) in (sum(values), values[-1]) or (values[0] == 0 and sorted({*values}) == values):
        says = "numbers that may say where documents begin; `seq_lengths` or `cu_seqlens` would be read"
        refuse_unread(name, says=says)


def may_say(name: str) -> bool:
    """Whether a number under a key that nothing reads may say what is learnt of a record's tokens."""
    return may_mark(name) or _is_split(name)


@lru_cache(maxsize=1 << 12)
def _is_split(name: str) -> bool:
    """Whether a number under a key may say which tokens are a prompt."""
    words = {*words_of(name)}
    return not words.isdisjoint(_PARTS) and not words.isdisjoint(_PLACES)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, np.ndarray))


def _numbers(values: Any, path: str, *, is_mask: bool = False) -> Int32Array:
    """The whole numbers of 32 bits in the list `values`, found at `path`: int32 [n]. A mask may have true and false."""
    if isinstance(values, np.ndarray):
        return values
    if type(values) is not list:
        wrong(f"`{path}` is {json_type(values)}, expected a list of whole numbers")
    kinds = set(map(type, values))
    if is_mask and not kinds <= {int} and kinds <= {int, bool, float} and {*values} <= {0, 1}:
        values, kinds = [int(value) for value in values], {int}
    if kinds <= {int}:
        try:
            return np.frombuffer(array("i", values), np.int32).copy()
        except OverflowError:
            place = next(index for index, value in enumerate(values) if not -(2**31) <= value < 2**31)
            wrong(f"`{path}[{place}]` is {values[place]}, which is more than 32 bits")
    place = next(index for index, value in enumerate(values) if type(value) is not int)
    return wrong(f"`{path}[{place}]` is {json_type(values[place])}, expected a whole number")


SCHEMA = Schema({"input_ids": ("input_ids",)}, parse, TOKEN_MARKS, reads=marks_of)
