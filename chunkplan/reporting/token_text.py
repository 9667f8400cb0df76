"""Decodes tokens of an analysis to text, by the tokenizer that made them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array
from chunkplan.errors import ChunkplanError, DataError, UsageError
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.backends.tiktoken_name import PREFIX as TIKTOKEN
from chunkplan.intake.tokenizer import RecordTokenizer
from chunkplan.planfile.analysis import Analysis

if TYPE_CHECKING:
    from chunkplan.intake.tokenizer import TokenizerLibrary

#: Tokens before a run that are decoded with it, so that it begins as it does in the text: with a space, or without.
NUM_CONTEXT = 4


@dataclass(frozen=True)
class TextPiece:
    """A run of tokens that all are targets, or all are not; and all special, or all text.

    A character that is cut shows as U+FFFD on both sides, an id that is no token as `[token ID]`.
    """

    text: str
    is_target: bool
    is_special: bool
    num_tokens: int


@dataclass(frozen=True)
class SequenceText:
    """Text of a sequence: its first and its last tokens, with `num_left_out` between them.

    Of those, `num_targets_left_out` are targets.
    """

    first: tuple[TextPiece, ...]
    last: tuple[TextPiece, ...]
    num_left_out: int
    num_targets_left_out: int


def open_tokenizer(
    analysis: Analysis, tokenizer: str | Path | None = None, *, chat_template: str | Path | None = None
) -> RecordTokenizer:
    """Load `tokenizer`; by default the one that made the tokens of `analysis`.

    Example: `chunkplan.open_tokenizer(chunkplan.load_analysis("analysis"))`

    `chat_template` is a file with the template to use in place of the tokenizer's. A relative path is looked up here
    and from each folder above the analysis, until the hash matches.

    Raises:
        UsageError: there is none.
        DataError: the one at its path has changed or is damaged.
    """
    if tokenizer is not None:
        return load_tokenizer(tokenizer, chat_template)
    made_by = analysis.manifest["tokenizer"]
    if made_by is None:
        raise UsageError(
            f"the analysis {analysis.path} does not say which tokenizer its tokens are of",
            hint="give one with --tokenizer",
        )
    path, content_hash = made_by["path"], made_by["content_hash"]
    if path.startswith(TIKTOKEN):
        places = [path]
    else:  # relative to where the analysis was made: here, or in a folder above it
        folders: list[str | Path] = ["", *analysis.path.resolve().parents]
        found_at = (Path(folder, path) for folder in folders)
        places = list(dict.fromkeys(str(place) for place in found_at if place.exists()))
    if not places:
        # It may be a name on the hub, or be gone; the network is only asked when somebody says so.
        raise UsageError(
            f"the tokenizer that the analysis was made with, {path}, is not a path here",
            hint="say with --tokenizer where it is, or which one on the hub",
        )
    errors: list[ChunkplanError] = []
    for place in places:
        try:
            found = load_tokenizer(place, chat_template)
        except ChunkplanError as error:
            errors.append(error)
            continue
        if content_hash == found.content_hash:
            return found
        message = f"content hash {found.content_hash[:12]}, the analysis has {content_hash[:12]}"
        errors.append(
            DataError(
                f"not the tokenizer that the analysis was made with: {message}",
                where=place,
                hint="say with --tokenizer where that one is, or which one to use",
            )
        )
    raise errors[0]


def decode_pieces(
    backend: TokenizerLibrary, input_ids: Int32Array, target: BoolArray, num_context: int
) -> tuple[TextPiece, ...]:
    """Decode tokens with their target mask, both [n], of which the first `num_context` are context only."""
    ids = input_ids.tolist()
    is_known = np.array([backend.knows(input_id) for input_id in ids], np.bool_)
    is_special = np.array([backend.is_special(input_id) for input_id in ids], np.bool_)
    differs = np.diff(target) | np.diff(is_known) | np.diff(is_special)
    changes = np.flatnonzero(differs[num_context:]) + num_context + 1
    return tuple(
        TextPiece(
            text=_decode(backend, ids, start, stop) if is_known[start] else _unknown(ids[start:stop]),
            is_target=bool(target[start]),
            is_special=bool(is_special[start]),
            num_tokens=stop - start,
        )
        for start, stop in pairwise([num_context, *changes.tolist(), len(ids)])
    )


def decode_sequence(
    backend: TokenizerLibrary,
    input_ids: Int32Array,
    target: BoolArray,
    most: int | None = None,
    *,
    num_context: int = 0,
) -> SequenceText:
    """Decode a sequence, or a part of one behind `num_context` tokens of it, with its target mask, both [n].

    Of one with more than `most` tokens these are decoded, at its two ends.
    """
    num_tokens = len(input_ids)
    if most is None or num_tokens - num_context <= most:
        return SequenceText(decode_pieces(backend, input_ids, target, num_context), (), 0, 0)
    first_stop = num_context + most - most // 4
    start = num_tokens - most // 4
    before = start - NUM_CONTEXT
    return SequenceText(
        first=decode_pieces(backend, input_ids[:first_stop], target[:first_stop], num_context),
        last=decode_pieces(backend, input_ids[before:], target[before:], NUM_CONTEXT),
        num_left_out=start - first_stop,
        num_targets_left_out=int(target[first_stop:start].sum()),
    )


def _decode(backend: TokenizerLibrary, ids: list[int], start: int, stop: int) -> str:
    context = [input_id for input_id in ids[max(0, start - NUM_CONTEXT) : start] if backend.knows(input_id)]
    before, through = backend.decode(context), backend.decode([*context, *ids[start:stop]])
    return through.removeprefix(before) if through.startswith(before) else backend.decode(ids[start:stop])


def _unknown(ids: list[int]) -> str:
    return "".join(f"[token {input_id}]" for input_id in ids)


@dataclass(frozen=True)
class TextSource:
    """An analysis and what decodes its tokens; without a tokenizer, `why_not` in words, None if nobody expects text."""

    analysis: Analysis | None = None
    tokenizer: RecordTokenizer | None = None
    why_not: str | None = None
