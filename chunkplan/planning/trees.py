"""Finds the sequences of a step whose first tokens are equal: they make a tree, and each of its tokens is run once.

Sequences sorted by their tokens stand beside those that they share most with: each begins in the one before it, or in
one that this begins in. It runs the last token that is equal again, whose prediction is its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.cost.durations import attention_pairs_of, whole_pairs, work_ns
from chunkplan.cost.model import CostModel

#: Token ids int32 and target mask bool [num_tokens] of a sequence, by its id.
TokensOf = Callable[[int], tuple[Int32Array, BoolArray]]

#: A sequence begins in another one where it saves so many tokens, and so many times as many are not more than its own.
LEAST_SHARED, LEAST_SHARED_PARTS = 32, 32

#: Trees with more work than one part in so many of a rank's share of the step are cut: each is tried.
_SHARE_PARTS = (1, 2, 4, 8)

#: Bytes of a token in `_text_of`.
_BYTES = 4


class Tree(NamedTuple):
    """Sequences [n], each after the one that it begins in.

    `ids`, `lengths` int64. `parent` int64: the place of the one that it begins in, -1 of the first alone; `begin`
    int64: tokens of it that are that one's, which it does not run itself.
    """

    ids: Int64Array
    lengths: Int64Array
    parent: Int64Array
    begin: Int64Array


def find_trees(ids: Int64Array, lengths: Int64Array, tokens_of: TokensOf, dp: int, cost: CostModel) -> list[Tree]:
    """The trees of the sequences of a step, `ids` and `lengths` [n]; many are of one sequence.

    A tree is on one rank of `dp`: one with too much work is cut into several, which run what they share again. A
    sequence that comes twice shares with none.
    """
    texts = {each: _text_of(*tokens_of(each)) for each in ids.tolist()}
    is_twice = np.isin(ids, [each for each, count in Counter(ids.tolist()).items() if count > 1])
    order = np.array(sorted(range(ids.size), key=lambda place: (is_twice[place], texts[int(ids[place])])), np.int64)
    ids, lengths, is_twice = ids[order], lengths[order], is_twice[order]
    begin = np.zeros(ids.size, np.int64)
    begin[1:] = [_num_common(texts[one], texts[other]) - 1 for one, other in pairwise(ids.tolist())]
    begin[is_twice | (begin < LEAST_SHARED) | (begin * LEAST_SHARED_PARTS < lengths - begin)] = 0
    if dp > 1:
        begin = _cut_even(begin, lengths, dp, cost)
    starts = np.append(np.flatnonzero(begin == 0), ids.size)
    return [_tree_of(ids[i:j], lengths[i:j], begin[i:j]) for i, j in pairwise(starts.tolist())]


def trees_alone(ids: Int64Array, lengths: Int64Array) -> list[Tree]:
    """A tree of each sequence alone, `ids` and `lengths` [n]."""
    return [
        _tree_of(ids[place : place + 1], lengths[place : place + 1], np.zeros(1, np.int64)) for place in range(ids.size)
    ]


def _text_of(input_ids: Int32Array, target: BoolArray) -> bytes:
    """Tokens, with whether they are targets, as bytes that are in the order of the tokens."""
    return (2 * input_ids.astype(np.int64) + target).astype(">u4").tobytes()


def _num_common(one: bytes, other: bytes) -> int:
    """The number of tokens that two texts begin with alike."""
    if one[: _BYTES * LEAST_SHARED] != other[: _BYTES * LEAST_SHARED]:
        return 0
    most = min(len(one), len(other)) // _BYTES
    is_other = np.frombuffer(one, ">u4", most) != np.frombuffer(other, ">u4", most)
    return int(is_other.argmax()) if is_other.any() else most


def _tree_of(ids: Int64Array, lengths: Int64Array, begin: Int64Array) -> Tree:
    """The tree of sequences in order of their tokens: each begins in the last one that runs tokens before `begin`."""
    parent = np.full(ids.size, -1, np.int64)
    for place in range(1, ids.size):
        above = place - 1
        while begin[above] >= begin[place]:
            above = int(parent[above])
        parent[place] = above
    return Tree(ids, lengths, parent, begin)


def _cut_even(begin: Int64Array, lengths: Int64Array, dp: int, cost: CostModel) -> Int64Array:
    """`begin` [n] with 0 where trees are cut such that the rank with most work has least, if dearest trees are dealt
    first, each to the rank with the least work."""
    whole = work_ns(cost, lengths, whole_pairs(cost, lengths))
    pairs = attention_pairs_of(lengths - begin, begin, cost.shape.attention_patterns)
    own = work_ns(cost, lengths - begin, pairs)
    rows = list(zip(begin.tolist(), own.tolist(), whole.tolist(), strict=True))
    best, least = begin, -1
    for parts in _SHARE_PARTS:
        cut, most, held = begin.copy(), int(own.sum()) // (dp * parts), 0
        works: list[int] = []
        for place, (begins, of_own, of_whole) in enumerate(rows):
            if begins and held + of_own <= most:
                held += of_own
                works[-1] = held
            else:
                cut[place], held = 0, of_whole
                works.append(held)
        loads = [0] * dp
        heapify(loads)
        for work in sorted(works, reverse=True):
            heapreplace(loads, loads[0] + work)
        if least < 0 or max(loads) < least:
            best, least = cut, max(loads)
    return best
