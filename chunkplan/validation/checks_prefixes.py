"""The invariants of sequences that begin in others: what they share, in which order it is run, and who waits for it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array, offsets_of
from chunkplan.validation.chunk_columns import ChunkColumns, Violation

#: Tokens that are compared at once, of one sequence at least.
_AT_ONCE = 1 << 20


def check_prefixes(columns: ChunkColumns) -> Iterator[Violation | None]:
    """A sequence begins in one of its step that runs the token before itself, and has the same tokens up to there.

    Both come once in the step. The token after those that are shared is equal too: it is the label of the last one.
    """
    step, sequence, other, shared = (values.astype(np.int64) for values in columns.prefixes)
    if not step.size:
        return

    def at(bad: BoolArray, message: str) -> Violation | None:
        if not bad.any():
            return None
        row = int(np.argmax(bad))
        told = f"sequence {sequence[row]} shares {shared[row]} tokens with {other[row]}, {message}"
        return Violation("", told, int(step[row]), count=int(bad.sum()))

    yield at(np.diff(step << 32 | sequence, prepend=-1) <= 0, "but rows are not in order of step and sequence_id")
    lengths = np.append(columns.analysis.num_tokens, 0)
    unknown = [(ids < 0) | (ids >= lengths.size - 1) for ids in (sequence, other)]
    yield at(unknown[0] | unknown[1], "but one of these is not in the analysis")
    yield at((shared < 1) | (shared >= np.minimum(lengths[sequence], lengths[other])), "but is no longer than that")
    row = columns.prefixes.row_of(step, other)
    yield at((row >= 0) & (shared[row] >= shared), "which does not run the last of them itself")
    first = columns.start == 0
    begins = (columns.step_of_segments[first].astype(np.int64) << 32) | columns.sequence_id[first]
    begins.sort()
    for ids in (sequence, other):
        key = step << 32 | ids
        times = np.searchsorted(begins, key, side="right") - np.searchsorted(begins, key)
        yield at(times != 1, "one of which does not begin once in the step, after what it shares")
    if columns.analysis.has_tokens:
        differs = _first_difference(columns, sequence, other, shared + 1)
        names = [columns.analysis.place(int(ids[np.argmax(differs >= 0)])) for ids in (sequence, other)]
        at_token = differs[np.argmax(differs >= 0)]
        yield at(differs >= 0, f"but their tokens differ at {at_token} ({names[0]} and {names[1]})")


def check_tree_groups(columns: ChunkColumns) -> Iterator[Violation | None]:
    """Tokens of a tree come after those that they follow, in the same standalone chunk or the same group.

    The chunks of such a group hold one tree alone; those that none depends on keep their activations.
    """
    if not columns.prefixes.step.size:
        return
    before, unit = columns.segment_before, columns.unit_of_segments
    is_of_tree = columns.is_tree[columns.chunk_of_segments]
    late = (before == -2) | ((before >= 0) & ((before >= np.arange(before.size)) | (unit[before] != unit)))
    late &= is_of_tree | (columns.begin > 0)
    yield columns.at(
        columns.holds(np.flatnonzero(late)), lambda row: "tokens do not come after those that they follow in a tree"
    )
    roots = np.flatnonzero((before == -1) & is_of_tree)
    chunk = columns.chunk_of_segments[roots]
    start = columns.group_start[chunk]
    bad = np.zeros(columns.num_chunks, bool)
    bad[chunk[(start != chunk) | (np.diff(unit[roots], prepend=-1) == 0)]] = True
    yield columns.at(bad, lambda row: "tokens that are not of the group's tree")
    index, size = np.arange(columns.num_chunks) - columns.group_start, np.bincount(columns.group_start + 1)
    wrong = (columns.chunks["group_index"] != index) | (columns.chunks["group_size"] != size[columns.group_start + 1])
    yield columns.at(columns.is_tree & wrong, lambda row: "chunks of a tree have a gap or are out of order")
    leaf = columns.is_tree & (columns.group_order.last_dependent == index) & ~columns.chunks["keeps_activations"]
    yield columns.at(leaf, lambda row: "no chunk depends on it, and it does not keep its activations")


def check_last_dependent(columns: ChunkColumns) -> Iterator[Violation | None]:
    """A chunk's last_dependent is the highest group_index that attends to it, its own where none does."""
    if "last_dependent" not in columns.chunks:
        return
    expected = np.where(columns.is_tree, columns.group_order.last_dependent, columns.chunks["group_size"] - 1)
    stated = columns.chunks["last_dependent"]
    yield columns.at(stated != expected, lambda row: f"last_dependent is {stated[row]}, expected {expected[row]}")


def _first_difference(columns: ChunkColumns, one: Int64Array, other: Int64Array, stop: Int64Array) -> Int64Array:
    """The first of tokens [0, stop) in which two sequences differ, by id or by being a target, -1 for none; [n]."""
    reader, found = columns.analysis.tokens(), np.full(one.size, -1)
    total, row = offsets_of(stop), 0
    while row < one.size:
        last = max(int(np.searchsorted(total, total[row] + _AT_ONCE)) - 1, row + 1)
        zeros = np.zeros(last - row, np.int64)
        left, right = (reader.gather(ids[row:last], zeros, stop[row:last]) for ids in (one, other))
        places = np.flatnonzero((left[0] != right[0]) | (left[1] != right[1])) + total[row]
        of_row = np.searchsorted(total, places, side="right") - 1
        rows, firsts = np.unique(of_row, return_index=True)
        found[rows] = places[firsts] - total[rows]
        row = last
    return found
