"""Lists beside token ids: which tokens are padding, where documents of a packed row begin, and what counts in the loss.

The names and their meaning are those of

- transformers: `labels`, `attention_mask`, `position_ids`, `assistant_masks`, `cu_seq_lens_q`, `seq_idx`;
- TRL: `completion_mask` and `assistant_masks`, where a token counts that has both, and `seq_lengths`;
- axolotl and LLaMA-Factory: an `attention_mask` with the number of its document, from 1, for each token;
- verl: `loss_mask`, `response_mask`;
- NeMo and Megatron-Bridge: `seq_start_id`, beside which `loss_mask` has 1 where the next token is a target;
- torchtune: `input_pos`, `seq_lens`; OLMo: `label_mask`, `doc_lens`, `cu_doc_lens`; MaxText and others of JAX:
  `segment_ids`, `inputs_position`, `inputs_segmentation`; llm-foundry: `sequence_id`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.intake.schemas.fields import HINT, empty, wrong
from chunkplan.intake.schemas.marks import refuse_contradiction

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

#: Those that have a number for each token.
FOR_EACH = ("labels", "attention_mask", "loss_mask", "prompt_mask", "position_ids", "document_ids")

#: Those whose keys are of something else where they are no lists: a `document_id` may be a name.
ONLY_LISTS = ("document_ids", "seq_lengths", "cu_seqlens", "seq_start_id")

#: Masks of TRL, which may be there together: a token counts that has both.
_TOGETHER = ("completion_mask", "assistant_masks")


class MarkedTokens(NamedTuple):
    """The tokens [start, stop) that are no padding, where documents begin among them, and which tokens are targets."""

    start: int
    stop: int
    begins: Int64Array
    target: BoolArray


def read_marks(key: str, input_ids: Int32Array, marks: Mapping[str, Mapping[str, Int32Array]]) -> MarkedTokens:
    """What `marks`, role -> key -> numbers, say of the tokens under `key`; those of `FOR_EACH` have one for each.

    Raises:
        RecordError: they are not what they should be, or contradict each other.
    """
    extent = range(len(input_ids))
    said: dict[str, Int64Array] = {}
    for name, mask in marks.get("attention_mask", {}).items():
        extent = _inside(mask != 0, extent, name)
        begins = _of_padded(mask[extent.start : extent.stop], name, extent.start)
        said |= {name: begins} if mask.max() > 1 else {}
    for name, numbers in marks.get("document_ids", {}).items():
        is_behind = numbers[0] != 0 and numbers[-1] == 0
        extent = _inside(numbers > 0 if is_behind else numbers >= 0, extent, name)
        said[name] = _of_numbered(numbers[extent.start : extent.stop], name) + extent.start
    for name, numbers in marks.get("position_ids", {}).items():
        extent = _without_last_zeros(numbers, extent)
        said[name] = _of_positions(numbers[extent.start : extent.stop], name, extent.start) + extent.start
    if not extent:
        empty(f"all of `{key}` is padding")
    whole = len(extent) if extent.start else len(input_ids)
    for role, read in _DIVIDED.items():
        for name, numbers in marks.get(role, {}).items():
            found = read(numbers, len(extent), whole)
            if found is None:
                wrong(f"`{name}` does not divide the {len(extent)} tokens of `{key}` into documents")
            said[name] = found + extent.start
    said = {
        name: np.unique(np.append(places[(places >= extent.start) & (places < extent.stop)], extent.start))
        for name, places in said.items()
    }
    first, begins = next(iter(said.items()), ("", np.array([extent.start])))
    for name, others in said.items():
        if not np.array_equal(others, begins):
            refuse_contradiction(first, name, "where documents begin")
    is_asked = np.zeros(len(input_ids), np.bool_)
    is_asked[extent.start : extent.stop] = True
    is_asked[begins] = False  # nothing predicts the first token of a document
    return MarkedTokens(extent.start, extent.stop, begins, _targets(key, input_ids, marks, is_asked) & is_asked)


def _targets(
    key: str, input_ids: Int32Array, marks: Mapping[str, Mapping[str, Int32Array]], is_asked: BoolArray
) -> BoolArray:
    """Which tokens count, as labels and masks say together of those that are asked for; all where nothing says it."""
    said: dict[str, BoolArray] = {}
    for name, labels in marks.get("labels", {}).items():
        said[name] = labels != IGNORED
        other = np.flatnonzero(said[name] & (labels != input_ids))
        if other.size:
            place = int(other[0])
            wrong(
                f"`{name}[{place}]` is {labels[place]} and `{key}[{place}]` is {input_ids[place]}, "
                f"expected the same or {IGNORED}",
                hint="labels stand at the place of the token they are for: do not shift them",
            )
    masks = {name: _ones(mask, name) for name, mask in marks.get("loss_mask", {}).items()}
    if "loss_mask" in masks and "seq_start_id" in marks:
        masks["loss_mask"] = np.append(False, masks["loss_mask"][:-1])
    if set(_TOGETHER) <= masks.keys():
        masks[_TOGETHER[0]] &= masks.pop(_TOGETHER[1])
    said |= masks | {name: ~_ones(mask, name) for name, mask in marks.get("prompt_mask", {}).items()}
    first, target = next(iter(said.items()), ("", np.ones(len(input_ids), np.bool_)))
    for name, other_target in said.items():
        if np.any(is_asked & (target != other_target)):
            refuse_contradiction(first, name, "which tokens count in the loss")
    return target


def _ones(mask: Int32Array, name: str) -> BoolArray:
    ones: BoolArray = mask == 1
    _refuse_at(~ones & (mask != 0), lambda at: f"`{name}[{at}]` is {mask[at]}, expected 0 or 1")
    return ones


def _inside(kept: BoolArray, extent: range, name: str) -> range:
    """The part of `extent` between the first and the last token that is `kept`, which has no others between."""
    places = np.flatnonzero(kept)
    if not places.size:
        empty(f"`{name}` is all 0")
    start, stop = int(places[0]), int(places[-1]) + 1
    _refuse_at(
        ~kept[start:stop],
        lambda at: f"`{name}[{start + at}]` is 0 between ones: only padding at the ends can be left out",
    )
    return range(max(start, extent.start), max(min(stop, extent.stop), start, extent.start))


def _of_padded(mask: Int32Array, name: str, start: int) -> Int64Array:
    """Where documents begin that have their numbers, from 1, in an attention mask."""
    step = np.diff(mask, prepend=0)
    is_wrong = (step != 0) & (step != 1)
    _refuse_at(is_wrong, lambda at: f"`{name}[{start + at}]` is {mask[at]}, expected 0 or 1, or documents from 1 on")
    return np.flatnonzero(step) + start


def _of_numbered(numbers: Int32Array, name: str) -> Int64Array:
    """Where documents begin that have one number each, whichever it is."""
    begins = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 1))
    if len(np.unique(numbers[begins])) < len(begins):
        wrong(f"`{name}` has the same number in several places: a document has to be in one")
    return begins


def _without_last_zeros(positions: Int32Array, extent: range) -> range:
    """`extent` without the padding at its end, where every position is 0."""
    others = np.flatnonzero(positions[extent.start : extent.stop])
    stop = extent.start + int(others[-1]) + 1 if others.size else extent.stop
    return range(extent.start, stop) if extent.stop - stop > 1 else extent


def _of_positions(positions: Int32Array, name: str, start: int) -> Int64Array:
    """Where documents begin whose positions are counted from 0."""
    is_next = np.diff(positions, prepend=-1) == 1
    _refuse_at(
        (positions != 0) & ~is_next,
        lambda at: f"`{name}[{start + at}]` is {positions[at]}, expected one more than before, or 0 for a new document",
    )
    return np.flatnonzero(positions == 0)


def _of_lengths(numbers: Int32Array, num_inside: int, num_tokens: int) -> Int64Array | None:
    """Where documents of these lengths begin, which are all tokens, with or without padding; None: they are not."""
    ends = np.append(0, np.cumsum(numbers, dtype=np.int64))
    return _of_ends(ends, num_inside, num_tokens) if (numbers >= 0).all() else None


def _of_ends(numbers: Int64Array | Int32Array, num_inside: int, num_tokens: int) -> Int64Array | None:
    """Where documents begin that end where the next one begins, from 0 to the end of all; None: they do not."""
    is_all = len(numbers) > 1 and numbers[0] == 0 and numbers[-1] in (num_inside, num_tokens)
    return np.unique(numbers[:-1]).astype(np.int64) if is_all and (np.diff(numbers) >= 0).all() else None


def _of_begins(numbers: Int32Array, num_inside: int, num_tokens: int) -> Int64Array | None:
    """Where documents begin, from 0; None: they do not."""
    return _of_ends(np.append(numbers, num_tokens), num_inside, num_tokens)


_DIVIDED: dict[str, Callable[[Int32Array, int, int], Int64Array | None]] = {
    "seq_lengths": _of_lengths,
    "cu_seqlens": _of_ends,
    "seq_start_id": _of_begins,
}


def _refuse_at(is_wrong: BoolArray, say: Callable[[int], str], hint: str = HINT) -> None:
    """Raises RecordError for the first token that is wrong, of which `say` gives the words."""
    if is_wrong.any():
        wrong(say(int(np.argmax(is_wrong))), hint)
