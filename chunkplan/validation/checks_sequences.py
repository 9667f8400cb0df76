"""The invariants of sequences: each occurs as often as it should, whole or cut into the parts of one group.

An *occurrence* of a sequence is a whole segment, or the parts of a group from its first token to its last.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array, run_starts
from chunkplan.validation.chunk_columns import ChunkColumns
from chunkplan.validation.violation import Violation


def check_tokens_once(columns: ChunkColumns) -> Violation | None:
    """Every token of a kept sequence comes exactly as often as the sequence occurs in the epoch: once, as a rule.

    `batch-sizes` must hold: where an epoch has as many occurrences as it should and no sequence has too many, none has
    too few.
    """
    unknown = columns.holds(np.flatnonzero(~columns.is_known))
    found = columns.at("tokens-once", lambda row: "a sequence that the analysis does not have", unknown)
    if found:
        return found
    parts = columns.parts
    start, end = columns.start[parts], columns.end[parts]
    wrong = parts[(start < 0) | (end <= start) | (end > columns.sequence_tokens[parts])]
    if not wrong.size:
        epoch = columns.steps["epoch"][columns.chunks["step"][columns.part_chunk]].astype(np.int64)
        key = epoch * columns.analysis.num_sequences + columns.sequence_id[parts]
        wrong = np.append(parts[_unchained(columns, key)], _too_many(columns))
    return columns.at(
        "tokens-once", lambda row: "tokens of a sequence are missing or come twice in an epoch", columns.holds(wrong)
    )


def check_one_place(columns: ChunkColumns) -> Violation | None:
    """An occurrence never leaves its step and never spans two ranks, or blocks of ranks that share it."""
    astray = _unchained(columns, columns.home[columns.part_chunk] << 32 | columns.sequence_id[columns.parts])
    return columns.at(
        "one-step-one-rank",
        lambda row: "a part of a sequence whose other parts run elsewhere",
        columns.holds(columns.parts[astray]),
    )


def check_groups(columns: ChunkColumns) -> Violation | None:
    """A group is one split sequence: parts 0..size-1 in ascending chunks, without gaps.

    Each chunk of a group holds exactly one part (and whole sequences beside it), or a rank's slices of it; a standalone
    chunk holds whole sequences only and keeps its activations.
    """
    chunks, grouped, parts = columns.chunks, columns.is_grouped, columns.group_parts
    num_parts = np.bincount(parts.chunk, minlength=columns.num_chunks)
    found = columns.at(
        "groups",
        lambda row: f"holds {num_parts[row]} parts of split sequences, expected {int(grouped[row])}",
        num_parts != grouped,
    )
    if found:
        return found
    standalone = (chunks["group_index"] == 0) & (chunks["group_size"] == 1) & chunks["keeps_activations"]
    found = columns.at(
        "groups", lambda row: "a standalone chunk has index 0 of 1 and keeps its activations", ~grouped & ~standalone
    )
    if found:
        return found
    key = columns.place[parts.chunk] << 32 | chunks["group_id"][parts.chunk].astype(np.int64) + (1 << 31)
    order = np.argsort(key, kind="stable")  # rows are sorted by chunk_id within a rank
    key = key[order]
    rows, sequence, start, end = (values[order] for values in parts)
    first = run_starts(key)  # [num_parts], the first part of each part's group
    is_first, size = first == np.arange(first.size), np.bincount(first)[first]
    wrong = (chunks["group_index"][rows] != np.arange(rows.size) - first) | (chunks["group_size"][rows] != size)
    wrong |= (start != np.where(is_first, 0, np.roll(end, 1))) | (sequence != sequence[first])
    bad = np.zeros(columns.num_chunks, bool)
    bad[rows[wrong]] = True
    return columns.at("groups", lambda row: "parts of a group have a gap, are out of order or of two sequences", bad)


def check_prefix(columns: ChunkColumns) -> Violation | None:
    """A chunk's prefix_tokens is where its part starts, of a shared one the whole part, and 0 for a standalone one."""
    start = columns.part_start
    bad = columns.chunks["prefix_tokens"] != start
    return columns.at("prefix", lambda row: f"prefix_tokens is not {start[row]}, where its part starts", bad)


def _too_many(columns: ChunkColumns) -> Int64Array:
    """The segments, in order, with which an occurrence begins that its epoch should not have; int64."""
    borders = np.flatnonzero(np.diff(columns.steps["epoch"], prepend=-1))
    first_segment = np.append(columns.segments[columns.step_chunks[borders]], columns.segments[-1])
    found = []
    epochs = columns.steps["epoch"][borders].tolist()
    for epoch, (start, stop) in zip(epochs, pairwise(first_segment), strict=True):
        ids, expected = columns.sequence_id[start:stop], columns.occurrences(epoch)
        later = columns.parts[slice(*np.searchsorted(columns.parts, (start, stop)))]
        surplus = np.bincount(ids, minlength=expected.size)
        surplus -= expected
        np.subtract.at(surplus, columns.sequence_id[later[columns.start[later] != 0]], 1)
        if (surplus > 0).any():
            beginnings = np.flatnonzero((surplus[ids] > 0) & (columns.start[start:stop] == 0))
            beginnings = beginnings[np.argsort(ids[beginnings], kind="stable")]
            nth = np.arange(beginnings.size) - run_starts(ids[beginnings])
            found.append(start + beginnings[nth >= expected[ids[beginnings]]])
    return np.concatenate([np.empty(0, np.int64), *found])


def _unchained(columns: ChunkColumns, key: Int64Array) -> BoolArray:
    """Find the parts that cannot, with those of the same key, be strung together to whole sequences; [num_parts].

    Parts can be if as many start at a token as end before it, for every token between, and as many start at the first
    one as end with the last: however many occurrences there are, and wherever each of them is cut.

    Args:
        key: int64 [num_parts], from 0; parts of different sequences have different ones.
    """
    parts = columns.parts
    start, end = columns.start[parts].astype(np.int64), columns.end[parts].astype(np.int64)
    end[end == columns.sequence_tokens[parts]] = 0
    ordered = np.sort(key)
    keys = ordered[np.flatnonzero(np.diff(ordered, prepend=-1))]
    number = np.searchsorted(keys, key)
    starts, ends = number << 31 | start, number << 31 | end
    loose = np.zeros(parts.size, bool)
    if np.array_equal(np.sort(starts), np.sort(ends)):
        return loose
    borders, inverse = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    starts, ends = inverse[: parts.size], inverse[parts.size :]
    excess = np.bincount(starts, minlength=borders.size) - np.bincount(ends, minlength=borders.size)
    loose = (excess[starts] > 0) & (start > 0)
    is_named = np.zeros(keys.size, bool)
    is_named[number[loose]] = True
    loose |= (excess[ends] < 0) & (end > 0) & ~is_named[number]
    return loose
