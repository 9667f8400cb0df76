"""Cuts a tree of sequences into parts, and chooses which of their chunks keep activations.

Branches that fit a chunk stay whole. Those that do not are the trunk: its tokens are run in preorder, and fill chunks.
Then the branches that hang on it are packed best-fit decreasing, into room that is left and into chunks of their own,
which nothing depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array, sum_runs
from chunkplan.planning.trees import Tree


class Branches(NamedTuple):
    """A tree as runs of tokens that follow one another, [num_runs], each after those that it attends to.

    `sequence` (a place in the tree), `start`, `stop` int64: tokens of a sequence. Of each part, int64 [num_parts]:
    `run_stops`, the runs up to its end; `tokens`; `last_dependent`, the last part that attends to it, or itself.
    """

    sequence: Int64Array
    start: Int64Array
    stop: Int64Array
    run_stops: Int64Array
    tokens: Int64Array
    last_dependent: Int64Array


class _Nodes(NamedTuple):
    """Runs of tokens between which nothing branches, each after the one that it follows: lists [num_nodes]."""

    sequence: list[int]
    start: list[int]
    stop: list[int]
    before: list[int]
    after: list[list[int]]
    whole: list[int]  # tokens of it and all that follow


def cut_tree(tree: Tree, chunk_size: int, cost_of: Callable[[Branches], int]) -> Branches:
    """Cut a tree into parts of at most `chunk_size` tokens: of several ways the one with least `cost_of`, the first."""
    nodes = _nodes_of(tree)
    if nodes.whole[0] <= chunk_size:
        return _branches_of(nodes, [_preorder(nodes, 0)])
    ways = [_pack(nodes, chunk_size, fills, joins) for fills in (True, False) for joins in (False, True)]
    return min((_branches_of(nodes, way) for way in ways), key=cost_of)


def kept_chunks(last_dependent: Int64Array, weight: Int64Array, k: int) -> BoolArray:
    """The chunks of a tree that keep activations, bool [n]: those that none depends on, and at most K - 1 at a time of
    the others, such that the `weight` [n] of the chunks that keep none is least; of several ways the latest.

    Chunks run backward as soon as those that depend on them have: they are held as on a stack. What lies below a chunk
    there is held as long as it; so at most K - 1 of those on the way from the bottom to any chunk keep theirs.
    """
    n = last_dependent.size
    below = np.full(n, -1, np.int64)
    stack: list[int] = []
    depth = 0
    for chunk in range(n):
        below[chunk] = stack[-1] if stack else -1
        stack.append(chunk)
        while stack and last_dependent[stack[-1]] <= chunk:
            stack.pop()
        depth = max(depth, len(stack))
    keeps: BoolArray = last_dependent == np.arange(n)
    room = min(k - 1, depth)
    best = np.zeros((n + 1, room + 1), np.int64)  # of those above it, and with it; the last row: of all
    takes = np.zeros((n, room + 1), np.bool_)
    for chunk in range(n - 1, -1, -1):
        if not keeps[chunk]:
            taken = weight[chunk] + np.concatenate([[0], best[chunk, :-1]])
            takes[chunk, 1:] = taken[1:] > best[chunk, 1:]
            best[chunk] = np.where(takes[chunk], taken, best[chunk])
        best[below[chunk]] += best[chunk]
    left = np.full(n + 1, room, np.int64)
    for chunk in np.flatnonzero(~keeps).tolist():
        keeps[chunk] = takes[chunk, left[below[chunk]]]
        left[chunk] = left[below[chunk]] - keeps[chunk]
    return keeps


def _nodes_of(tree: Tree) -> _Nodes:
    """The nodes of a tree; a sequence goes on after a branch before what else does."""
    nodes = _Nodes([], [], [], [], [], [])
    stops: list[set[int]] = [{length} for length in tree.lengths.tolist()]
    for parent, begin in zip(tree.parent.tolist(), tree.begin.tolist(), strict=True):
        if parent >= 0:
            stops[parent].add(begin)
    ends: dict[tuple[int, int], int] = {}  # sequence and stop: the node
    for sequence, (parent, begin) in enumerate(zip(tree.parent.tolist(), tree.begin.tolist(), strict=True)):
        before = ends[parent, begin] if parent >= 0 else -1
        for start, stop in pairwise([begin, *sorted(stops[sequence])]):
            node = len(nodes.start)
            nodes.sequence.append(sequence)
            nodes.start.append(start)
            nodes.stop.append(stop)
            nodes.before.append(before)
            nodes.after.append([])
            nodes.whole.append(stop - start)
            if before >= 0:
                nodes.after[before].append(node)
            ends[sequence, stop] = before = node
    for node in range(len(nodes.start) - 1, 0, -1):
        nodes.whole[nodes.before[node]] += nodes.whole[node]
    return nodes


#: A node, and tokens [start, stop) of its sequence that are in its run.
_Piece = tuple[int, int, int]


def _preorder(nodes: _Nodes, root: int) -> list[_Piece]:
    """The whole runs of all nodes from `root` on, each before what follows it."""
    found, stack = [], [root]
    while stack:
        node = stack.pop()
        found.append((node, nodes.start[node], nodes.stop[node]))
        stack += reversed(nodes.after[node])
    return found


def _pack(nodes: _Nodes, chunk_size: int, fills: bool, joins: bool) -> list[list[_Piece]]:
    """The pieces of each chunk. Whole branches go into chunks with a part of the trunk only if it `fills`; a part of
    the trunk goes into one with another branch of the tree only if it `joins`."""
    chunks: list[list[_Piece]] = []
    room: list[int] = []
    is_trunk: list[bool] = []
    first = [0] * len(nodes.start)  # chunk from which on there is what hangs on a node of the trunk
    goes_on = False  # into the last chunk

    def open_chunk() -> None:
        chunks.append([])
        room.append(chunk_size)
        is_trunk.append(False)

    def run(node: int) -> None:
        start = nodes.start[node]
        while start < nodes.stop[node]:
            if not goes_on or not room[-1]:
                open_chunk()
            stop = min(start + room[-1], nodes.stop[node])
            chunks[-1].append((node, start, stop))
            room[-1] -= stop - start
            is_trunk[-1], start = True, stop
        first[node] = len(chunks) - 1

    def hang(node: int) -> None:
        whole = [each for each in nodes.after[node] if nodes.whole[each] <= chunk_size]
        for branch in sorted(whole, key=lambda each: -nodes.whole[each]):
            open_ones = range(first[node], len(chunks))
            fitting = [c for c in open_ones if room[c] >= nodes.whole[branch] and (fills or not is_trunk[c])]
            if not fitting:
                open_chunk()
            chosen = min(fitting, key=room.__getitem__, default=len(chunks) - 1)
            chunks[chosen] += _preorder(nodes, branch)
            room[chosen] -= nodes.whole[branch]

    stack = [(0, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            hang(node)
            goes_on = joins
            continue
        run(node)
        goes_on = True
        long = [each for each in nodes.after[node] if nodes.whole[each] > chunk_size]
        stack.append((node, True))
        stack += [(each, False) for each in sorted(long, key=lambda each: -nodes.whole[each])]
    return chunks


def _branches_of(nodes: _Nodes, chunks: list[list[_Piece]]) -> Branches:
    """The runs of all chunks, those of one sequence in a chunk together, and what depends on what."""
    runs: list[tuple[int, int, int]] = []
    run_stops = []
    part_of: list[list[int]] = [[] for _ in nodes.start]  # the parts in which pieces of a node are
    for part, pieces in enumerate(chunks):
        joined: dict[int, list[int]] = {}
        for node, start, stop in pieces:
            joined.setdefault(nodes.sequence[node], [start, stop])[1] = stop
            part_of[node].append(part)
        runs += [(sequence, start, stop) for sequence, (start, stop) in joined.items()]
        run_stops.append(len(runs))
    last = list(range(len(chunks)))
    furthest = [0] * len(nodes.start)  # the last part in which something follows a node
    for node in range(len(nodes.start) - 1, -1, -1):
        for part in part_of[node]:
            last[part] = max(last[part], furthest[node], part_of[node][-1])
        if nodes.before[node] >= 0:
            above = nodes.before[node]
            furthest[above] = max(furthest[above], furthest[node], part_of[node][-1])
    sequence, start, stop = np.array(runs, np.int64).T
    tokens = sum_runs(stop - start, np.array([0, *run_stops]))
    return Branches(sequence, start, stop, np.array(run_stops), tokens, np.array(last, np.int64))
