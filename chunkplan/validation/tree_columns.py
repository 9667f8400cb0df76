"""Trees of sequences as arrays: what each run of tokens follows, and what follows from that for the chunks of a group.

Independent of the planner on purpose, as all of what a validation looks at.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, IntArray


class Prefixes(NamedTuple):
    """The rows of prefixes.parquet, [num_rows]."""

    step: Int32Array
    sequence_id: Int64Array
    prefix_of: Int64Array
    prefix_tokens: Int32Array

    def row_of(self, step: IntArray, sequence_id: Int64Array) -> Int64Array:
        """The row of each of these sequences, -1 of those that begin in no other; int64, of their shape."""
        order = np.lexsort((self.sequence_id, self.step))
        own = _keys(self.step, self.sequence_id)[order]
        wanted = _keys(step, sequence_id)
        place = np.minimum(np.searchsorted(own, wanted), max(own.size - 1, 0))
        if not own.size:
            return np.full(wanted.shape, -1)
        return np.where(own[place] == wanted, order[place], -1)


class GroupOrder(NamedTuple):
    """The chunks of groups as they have to be, by what depends on them; int64 [num_chunks] each.

    `last_dependent`: the highest group_index that attends to a chunk. By those that are stated: `turn`, the place of a
    chunk among the backwards of its group; `holders`, how many chunks on which others depend hold activations when it
    has run forward.
    """

    last_dependent: Int64Array
    turn: Int64Array
    holders: Int64Array


def runs_before(
    prefixes: Prefixes, step: IntArray, sequence_id: Int64Array, start: Int64Array, end: Int64Array
) -> Int64Array:
    """The segment that ends in the token before each one [num_segments], -1 where a sequence begins in no other, and -2
    where nothing holds it. `start`, `end`: tokens of sequences; the steps ascend."""
    row = prefixes.row_of(step, sequence_id)
    begins = (row >= 0) & (start == np.append(prefixes.prefix_tokens, -1)[row])
    holder = np.where(begins, np.append(prefixes.prefix_of, -1)[row], sequence_id)
    order = np.lexsort((start, sequence_id, step))
    key, wanted = _keys(step, sequence_id)[order], _keys(step, holder)
    low, high = np.searchsorted(key, wanted), np.searchsorted(key, wanted, side="right")
    # Of the segments of a sequence in a step the last that starts before the token.
    number = np.cumsum(np.diff(key, prepend=key[:1] - 1) != 0) if key.size else key
    ranked = number << 32 | start[order]
    place = np.searchsorted(ranked, np.append(number, 0)[np.minimum(low, key.size - 1)] << 32 | start) - 1
    found = order[np.maximum(place, 0)]
    is_held = (place >= low) & (place < high) & (end[found] >= start)
    return np.where(is_held, found, np.where(start == 0, -1, -2))


def order_of_groups(
    chunk: Int64Array, before: Int64Array, group_start: Int64Array, stated: IntArray, keeps: BoolArray
) -> GroupOrder:
    """The order of trees: `chunk`, `before` of their segments [n], in order, each after the one `before` it (-1: none).

    `group_start` int64 [num_chunks]: the first chunk of the group of each, -1 where it is of no tree; `stated`:
    last_dependent; `keeps`: bool [num_chunks].
    """
    index = np.arange(group_start.size) - group_start
    furthest = index[chunk]
    for segment in range(chunk.size - 1, -1, -1):
        if before[segment] >= 0:
            furthest[before[segment]] = max(furthest[before[segment]], furthest[segment])
    last = index.copy()
    np.maximum.at(last, chunk, furthest)
    turn, holders = np.full(group_start.size, -1), np.zeros(group_start.size, np.int64)
    stack: list[int] = []
    turns = held = 0
    for place in np.flatnonzero(group_start >= 0).tolist():
        if place == group_start[place]:
            stack, turns, held = [], 0, 0
        stack.append(place)
        if keeps[place] and stated[place] > index[place]:
            held += 1
        holders[place] = held
        while stack and stated[stack[-1]] <= index[place]:
            done = stack.pop()
            held -= int(keeps[done] and stated[done] > index[done])
            turn[done], turns = turns, turns + 1
    return GroupOrder(last, turn, holders)


def _keys(step: IntArray, sequence_id: Int64Array) -> Int64Array:
    """One number for a sequence in a step; ids of files that are damaged are cut."""
    return step.astype(np.int64) << 31 | (sequence_id & (2**31 - 1))
