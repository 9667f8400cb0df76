"""Records that are tokens already: `input_ids`, perhaps with labels, masks, positions and the like beside them.

The names of lists and their meaning are those of

- transformers: `labels`, `attention_mask`, `position_ids`, `assistant_masks`, `cu_seq_lens_q`, `seq_idx`;
- TRL: `completion_mask` and `assistant_masks`, where a token counts that has both, and `seq_lengths`;
- axolotl and LLaMA-Factory: an `attention_mask` with the number of its document, from 1, for each token;
- verl: `loss_mask`, `response_mask`;
- NeMo and Megatron-Bridge: `seq_start_id`, beside which `loss_mask` has 1 where the next token is a target;
- torchtune: `input_pos`, `seq_lens`; OLMo: `label_mask`, `doc_lens`, `cu_doc_lens`; MaxText and others of JAX:
  `segment_ids`, `inputs_position`, `inputs_segmentation`; llm-foundry: `sequence_id`.
"""

from __future__ import annotations

import shlex
from array import array
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.intake.records import JsonObject, RecordError, TokensRecord
from chunkplan.intake.schemas.fields import (
    empty,
    json_type,
    quoted,
    refuse_contradiction,
    refuse_unread,
    unsupported,
    wrong,
)
from chunkplan.intake.schemas.keys import COUNTS, is_number, may_mark, may_split
from chunkplan.intake.schemas.rollouts import parse_rollout, refuse_unrewarded, rollout_keys

#: The label of a token that is no target.
IGNORED = -100

#: Role -> the keys that usually have it; all that a record has are read.
TOKEN_MARKS = {
    "labels": ("labels",),
    "attention_mask": ("attention_mask",),
    "loss_mask": (
        *("loss_mask", "loss_masks", "completion_mask", "assistant_masks", "assistant_mask", "response_mask"),
        *("label_mask", "loss_weights", "loss_scale"),
    ),
    "prompt_mask": ("prompt_mask",),
    "position_ids": ("position_ids", "input_pos", "inputs_position"),
    "document_ids": (
        *("document_ids", "document_id", "doc_ids", "segment_ids", "sequence_ids", "sequence_id", "seq_idx"),
        *("inputs_segmentation", "decoder_segment_ids"),
    ),
    "seq_lengths": ("seq_lengths", "seq_lens", "seqlens", "sequence_lengths", "doc_lens", "document_lengths"),
    "cu_seqlens": (
        *("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k"),
        *("cu_doc_lens", "cumulative_len"),
    ),
    "seq_start_id": ("seq_start_id", "seq_start_ids"),
}
_ROLES = {key: role for role, keys in TOKEN_MARKS.items() for key in keys}

#: The schemas of records that are tokens.
OF_TOKENS = ("input_ids", "prompt_ids+response_ids")

#: Roles that have a number for each token; and those whose keys are of something else where they are no lists: a
#: `document_id` may be a name.
FOR_EACH = ("labels", "attention_mask", "loss_mask", "prompt_mask", "position_ids", "document_ids")
_ONLY_LISTS = ("document_ids", "seq_lengths", "cu_seqlens", "seq_start_id")

#: Lists of tokenizers that say nothing of what is learnt.
HARMLESS = ("special_tokens_mask", "token_type_ids")

#: Role -> key -> numbers.
_Marks = Mapping[str, Mapping[str, Int32Array]]


def parse_tokens(record: JsonObject, columns: dict[str, str]) -> TokensRecord:
    """Read tokens with their marks; labels and masks are not shifted, and padding is left out.

    Raises RecordError where lists are no whole numbers of one length or contradict each other, another key may say what
    counts, or there are no tokens.
    """
    key = columns["input_ids"]
    input_ids = _ids(record, key)
    if not len(input_ids):
        _empty(f"`{key}` has no tokens", record, columns)
    roles = {role: name for name, role in rollout_keys(record, columns).items()}
    name = roles.get("response_length")
    response = len(input_ids) if name is None else record[name]
    if type(response) is not int or not 0 < response <= len(input_ids):
        wrong(f"`{name}` is {response}, expected a number of tokens from 1 to the {len(input_ids)} of `{key}`")
    return _parse(record, columns, (key,), input_ids, response)


def parse_response(record: JsonObject, columns: dict[str, str]) -> TokensRecord:
    """Read the tokens of a prompt and of what was answered, whose marks are as long as the answer or as both.

    Raises RecordError as `parse_tokens`.
    """
    names = columns["prompt_ids"], columns["response_ids"]
    prompt, response = (_ids(record, name) for name in names)
    if not len(response):
        _empty(f"`{names[1]}` has no tokens", record, columns)
    input_ids = np.concatenate([prompt, response])
    whole = record.get("input_ids")
    is_both = isinstance(whole, (list, np.ndarray)) and np.array_equal(whole, input_ids)
    return _parse(record, columns, (*names, "input_ids") if is_both else names, input_ids, len(response))


def _empty(message: str, record: JsonObject, columns: dict[str, str]) -> NoReturn:
    """Raise RecordError for no tokens; those of a rollout are missed in its group, so that it is not just blank."""
    if rollout_keys(record, columns):
        hint = "leave out its whole group, or give the token that ended it"
        wrong(f"{message}, and what is compared within its group is to be all that was sampled", hint)
    empty(message)


def _ids(record: JsonObject, key: str) -> Int32Array:
    """The token ids under `key`, none of them negative; raises RecordError."""
    if key not in record:
        wrong(f"`{key}` is missing, expected a list of token ids, found the keys {quoted(record)}")
    input_ids = _numbers(record[key], key)
    if len(input_ids) and input_ids.min() < 0:
        wrong(f"`{key}[{int(input_ids.argmin())}]` is {input_ids.min()}, expected a token id")
    return input_ids


def _parse(
    record: JsonObject, columns: dict[str, str], keys: tuple[str, ...], input_ids: Int32Array, num_response: int
) -> TokensRecord:
    """Read the marks beside `input_ids`, found under `keys`, the last `num_response` of which are an answer.

    Those for each token are as long as all of them, or as the answer; where none says what counts, the answer does.
    """
    key, num_prompt = keys[0], len(input_ids) - num_response
    marks: dict[str, dict[str, Int32Array]] = {}
    numbered = rollout_keys(record, columns)
    for name, role in marks_of(record, columns).items():
        if name in numbered:
            continue
        numbers = _numbers(record[name], name, is_mask=role.endswith("mask"))
        if role in FOR_EACH and num_prompt and len(numbers) == num_response:
            numbers = np.concatenate([np.full(num_prompt, IGNORED if role == "labels" else 0, np.int32), numbers])
        if role in FOR_EACH and len(numbers) != len(input_ids):
            wrong(f"`{name}` has {len(numbers)} entries and `{key}` has {len(input_ids)}")
        marks.setdefault(role, {})[name] = numbers
    is_stated = not marks.keys().isdisjoint(("labels", "loss_mask", "prompt_mask"))
    if num_prompt and not is_stated:
        marks["loss_mask"] = {key: (np.arange(len(input_ids)) >= num_prompt).astype(np.int32)}
    for name in record.keys() - {*keys, *HARMLESS, *numbered, *(name for names in marks.values() for name in names)}:
        _refuse_mark(name, record[name], input_ids, marks)
    is_answer = len(keys) > 1 or "response_length" in numbered.values()
    if len(keys) > 1 and not numbered:
        refuse_unrewarded(record, columns)
    try:
        extent, begins = _documents(key, input_ids, marks)
    except RecordError as error:
        if error.reason == "empty":
            _empty(error.message, record, columns)
        raise
    is_asked = np.zeros(len(input_ids), np.bool_)
    is_asked[extent.start : extent.stop] = True
    is_asked[begins] = False  # nothing predicts the first token of a document
    counts = _targets(key, input_ids, marks, is_asked)
    target = counts & is_asked
    inside = slice(extent.start, extent.stop)
    rollout = None
    if numbered:
        if not is_stated and not is_answer:
            wrong("nothing says which tokens were sampled", "give `response_mask`, 1 at tokens that were sampled")
        if len(begins) > 1:
            unsupported("a rollout in a packed row of several documents", "write a record for each")
        prompt = input_ids[inside][: int(np.argmax(counts[inside]))]
        rollout = parse_rollout(record, numbered, prompt, target, extent, num_response)
    return TokensRecord(input_ids[inside], target[inside], begins - extent.start, rollout)


def marks_of(record: JsonObject, columns: Mapping[str, str]) -> dict[str, str]:
    """The keys of `record` that say something of its tokens, each with its role: those of `columns` and usual ones."""
    roles = _ROLES | {key: role for role, key in columns.items() if role in TOKEN_MARKS}
    numbered = rollout_keys(record, columns)
    found = {key: roles[key] for key, value in record.items() if key in roles and value is not None}
    is_list = {key: isinstance(record[key], (list, np.ndarray)) for key in found}
    return {key: role for key, role in found.items() if is_list[key] or role not in _ONLY_LISTS} | numbered


def refuse_mixed(record: JsonObject, columns: Mapping[str, str], expected: Collection[str]) -> None:
    """Raise RecordError where other keys say something of the tokens of `record` than the `expected` of its source."""
    found = marks_of(record, columns)
    for key in (*(key for key in expected if key not in found), *(key for key in found if key not in expected)):
        has_not, has = f"`{key}` is missing or null, and other records have it", f"`{key}` is not in the first records"
        hint = "give it to all records of a file, or put those without it into another file"
        wrong(has_not if key in expected else has, hint)


def _refuse_mark(name: str, value: Any, input_ids: Int32Array, marks: _Marks) -> None:
    """Raise RecordError where `value`, which nothing reads, may say what is learnt of the tokens or how they part."""
    is_stated = not marks.keys().isdisjoint(("labels", "loss_mask", "prompt_mask"))
    if may_split(name) and is_number(value) and not is_stated:
        refuse_unread(name, says="what may say which tokens are a prompt; `labels` or `loss_mask` would be read")
    if not isinstance(value, (list, np.ndarray)):
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


def _numbers(values: Any, path: str, *, is_mask: bool = False) -> Int32Array:
    """The whole numbers of 32 bits in the list `values`, found at `path`: int32 [n]. A mask may have true and false."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind != "f":
            return values
        values = values.tolist()
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


def _documents(key: str, input_ids: Int32Array, marks: _Marks) -> tuple[range, Int64Array]:
    """The tokens under `key` that are no padding, and where documents begin among them: int64, ascending."""
    extent = range(len(input_ids))
    said: dict[str, Int64Array] = {}
    for name, mask in marks.get("attention_mask", {}).items():
        extent = _inside(mask != 0, extent, name)
        step = np.diff(mask[extent.start : extent.stop], prepend=0)
        if (at := _first_at((step != 0) & (step != 1), extent.start)) is not None:
            wrong(f"`{name}[{at}]` is {mask[at]}, expected 0 or 1, or documents from 1 on")
        said |= {name: np.flatnonzero(step) + extent.start} if mask.max() > 1 else {}
    for name, numbers in marks.get("document_ids", {}).items():
        is_behind = numbers[0] != 0 and numbers[-1] == 0
        extent = _inside(numbers > 0 if is_behind else numbers >= 0, extent, name)
        own = numbers[extent.start : extent.stop]
        begins = np.flatnonzero(np.diff(own, prepend=own[:1] - 1))
        if len(np.unique(own[begins])) < len(begins):
            wrong(f"`{name}` has the same number in several places: a document has to be in one")
        said[name] = begins + extent.start
    for name, positions in marks.get("position_ids", {}).items():
        others = np.flatnonzero(positions[extent.start : extent.stop])
        stop = extent.start + int(others[-1]) + 1 if others.size else extent.stop
        extent = range(extent.start, stop) if extent.stop - stop > 1 else extent  # behind it all is 0: padding
        own = positions[extent.start : extent.stop]
        if (at := _first_at((own != 0) & (np.diff(own, prepend=-1) != 1), extent.start)) is not None:
            wrong(f"`{name}[{at}]` is {positions[at]}, expected one more than before, or 0 for a new document")
        said[name] = np.flatnonzero(own == 0) + extent.start
    if not extent:
        empty(f"all of `{key}` is padding")
    for role in ("seq_lengths", "cu_seqlens", "seq_start_id"):
        for name, numbers in marks.get(role, {}).items():
            stops = (len(extent), len(extent) if extent.start else len(input_ids))
            said[name] = _document_starts(role, numbers, stops, name, key) + extent.start
    for name, places in said.items():
        inside = places[(places >= extent.start) & (places < extent.stop)]
        said[name] = np.unique(np.append(inside, extent.start))
    first, begins = next(iter(said.items()), ("", np.array([extent.start])))
    for name, others in said.items():
        if not np.array_equal(others, begins):
            refuse_contradiction(first, name, "where documents begin")
    return extent, begins


def _inside(kept: BoolArray, extent: range, name: str) -> range:
    """The part of `extent` between the first and the last token that is `kept`, which has no others between."""
    places = np.flatnonzero(kept)
    if not places.size:
        empty(f"`{name}` is all 0")
    start, stop = int(places[0]), int(places[-1]) + 1
    if (at := _first_at(~kept[start:stop], start)) is not None:
        wrong(f"`{name}[{at}]` is 0 between ones: only padding at the ends can be left out")
    return range(max(start, extent.start), max(min(stop, extent.stop), start, extent.start))


def _document_starts(role: str, numbers: Int32Array, stops: tuple[int, int], name: str, key: str) -> Int64Array:
    """Return where documents begin that have these lengths, ends or begins and cover all tokens."""
    ends: Int64Array | Int32Array = numbers
    if role == "seq_lengths":
        ends = np.append(0, np.cumsum(numbers, dtype=np.int64))
    elif role == "seq_start_id":
        ends = np.append(numbers, stops[1])
    is_all = len(ends) > 1 and ends[0] == 0 and ends[-1] in stops
    if not is_all or (np.diff(ends) < 0).any():
        wrong(f"`{name}` does not divide the {stops[0]} tokens of `{key}` into documents")
    return np.unique(ends[:-1]).astype(np.int64)


def _targets(key: str, input_ids: Int32Array, marks: _Marks, is_asked: BoolArray) -> BoolArray:
    """Return which tokens count, as labels and masks say together; all where nothing says it."""
    said: dict[str, BoolArray] = {}
    for name, labels in marks.get("labels", {}).items():
        said[name] = labels != IGNORED
        if (at := _first_at(said[name] & (labels != input_ids), 0)) is not None:
            wrong(
                f"`{name}[{at}]` is {labels[at]} and `{key}[{at}]` is {input_ids[at]}, expected the same or {IGNORED}",
                hint="labels stand at the place of the token they are for: do not shift them",
            )
    masks = {name: _ones(mask, name) for name, mask in marks.get("loss_mask", {}).items()}
    if "loss_mask" in masks and "seq_start_id" in marks:
        masks["loss_mask"] = np.append(False, masks["loss_mask"][:-1])
    if {"completion_mask", "assistant_masks"} <= masks.keys():  # of TRL, where a token counts that has both
        masks["completion_mask"] &= masks.pop("assistant_masks")
    said |= masks | {name: ~_ones(mask, name) for name, mask in marks.get("prompt_mask", {}).items()}
    first, target = next(iter(said.items()), ("", np.ones(len(input_ids), np.bool_)))
    for name, other_target in said.items():
        if np.any(is_asked & (target != other_target)):
            refuse_contradiction(first, name, "which tokens count in the loss")
    return target


def _ones(mask: Int32Array, name: str) -> BoolArray:
    if (at := _first_at((mask != 0) & (mask != 1), 0)) is not None:
        wrong(f"`{name}[{at}]` is {mask[at]}, expected 0 or 1")
    ones: BoolArray = mask == 1
    return ones


def _first_at(is_wrong: BoolArray, start: int) -> int | None:
    """The first token that is wrong, of those from `start` on."""
    return start + int(np.argmax(is_wrong)) if is_wrong.any() else None
