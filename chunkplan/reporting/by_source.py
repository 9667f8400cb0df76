"""Counts by source: its sequences, how many of them are split, and what is left out of training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chunkplan.arrays import Int64Array, IntArray
from chunkplan.errors import DataError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.chunks import Chunks
from chunkplan.planfile.plan import VALIDATE_HINT


@dataclass(frozen=True, kw_only=True)
class SourceRow:
    """Counts of a source of an analysis, or of a plan, which counts a sequence as often as it holds it.

    `longest`: tokens of its longest sequence, 0 if it has none. `num_split_tokens` are in sequences that a plan splits,
    `num_absent_tokens` in those that it does not hold: held out, dropped or not selected. Both are None for an
    analysis. `num_rejected` records became no sequence, and `num_cut_tokens` were cut off sequences that were too long;
    None for an analysis without these entries.
    """

    path: str
    num_sequences: int
    num_tokens: int
    num_target_tokens: int
    longest: int
    num_split_tokens: int | None
    num_absent_tokens: int | None
    num_rejected: int
    num_cut_tokens: int | None


def sources_of(analysis: Analysis, chunks: Chunks | None = None) -> tuple[SourceRow, ...]:
    """Measure the sources of `analysis`, in its order, or what all `chunks` of a plan hold of them.

    Of a bare file of lengths there are none.

    Raises:
        DataError: the chunks have sequences that the analysis has not, or the analysis is damaged.
    """
    entries = analysis.manifest.get("sources") or ()
    if not entries:
        return ()
    if chunks is not None:
        check_sequences(analysis, chunks)
    source = _source(analysis, len(entries))
    held = np.arange(analysis.num_sequences) if chunks is None else chunks.sequence_id[chunks.start == 0]
    lengths = analysis.num_tokens[held]
    longest = np.zeros(len(entries), np.int64)
    np.maximum.at(longest, source[held], lengths)
    counts = np.bincount(source[held], minlength=len(entries))
    tokens = _sums(source[held], lengths, len(entries))
    targets = _sums(source[held], analysis.num_target_tokens[held], len(entries))
    split, absent = (None, None) if chunks is None else _split_and_absent(analysis, chunks, source, len(entries))
    return tuple(
        SourceRow(
            path=entry["path"],
            num_sequences=int(counts[place]),
            num_tokens=int(tokens[place]),
            num_target_tokens=int(targets[place]),
            longest=int(longest[place]),
            num_split_tokens=None if split is None else int(split[place]),
            num_absent_tokens=None if absent is None else int(absent[place]),
            num_rejected=entry.get("rejected", 0),
            num_cut_tokens=entry.get("num_truncated_tokens"),
        )
        for place, entry in enumerate(entries)
    )


def check_sequences(analysis: Analysis, chunks: Chunks) -> None:
    """Raises DataError where `chunks` have sequences that `analysis`, the one of their plan, has not."""
    wrong = chunks.sequence_id[(chunks.sequence_id < 0) | (chunks.sequence_id >= analysis.num_sequences)]
    if wrong.size:
        raise DataError(f"the analysis has no sequence {wrong[0]}", where="chunks.parquet", hint=VALIDATE_HINT)


def _source(analysis: Analysis, num_sources: int) -> IntArray:
    """Return the source of each sequence, int [n]."""
    source = analysis.source
    if source.size and not 0 <= int(source.min()) <= int(source.max()) < num_sources:
        raise DataError(
            "sequences are of sources that it does not name", where=str(analysis.path), hint="analyze again"
        )
    return source


def _split_and_absent(
    analysis: Analysis, chunks: Chunks, source: IntArray, num_sources: int
) -> tuple[Int64Array, Int64Array]:
    """Return tokens in sequences that chunks hold in several pieces, and in those that none holds: by source."""
    tokens = chunks.end - chunks.start
    is_piece = tokens < analysis.num_tokens[chunks.sequence_id]
    is_absent = np.ones(analysis.num_sequences, np.bool_)
    is_absent[chunks.sequence_id] = False
    return (
        _sums(source[chunks.sequence_id[is_piece]], tokens[is_piece], num_sources),
        _sums(source[is_absent], analysis.num_tokens[is_absent], num_sources),
    )


def _sums(source: IntArray, values: IntArray, num_sources: int) -> Int64Array:
    """Sum `values` by source: below 2^53, so exact."""
    return np.bincount(source, weights=values, minlength=num_sources).astype(np.int64)
