"""Every way to run a small tree: all orders and retained sets of chunks, and all ways to cut a tree into chunks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np

from chunkplan.planning.branches import Branches
from chunkplan.planning.trees import Tree

#: States of a chunk: not run yet, held with its activations, held without, done.
WAITING, KEPT, BARE, DONE = range(4)


def least_again(parent: list[int], weight: list[int], k: int) -> int:
    """The least weight of chunks that run twice over all orders in which a tree of chunks can run forward and backward,
    and all choices of those that keep activations, where at most k - 1 with dependents do at a time."""
    n = len(parent)
    inner = [chunk in parent for chunk in range(n)]

    @cache
    def least(states: tuple[int, ...]) -> float:
        if all(state == DONE for state in states):
            return 0
        best = float("inf")
        for chunk, state in enumerate(states):
            if state == WAITING and (parent[chunk] < 0 or states[parent[chunk]] in (KEPT, BARE)):
                held = sum(inner[each] and other == KEPT for each, other in enumerate(states))
                for kept in (KEPT, BARE):
                    if (kept == KEPT and inner[chunk] and held >= k - 1) or (kept == BARE and not inner[chunk]):
                        continue
                    after = least((*states[:chunk], kept, *states[chunk + 1 :]))
                    best = min(best, after + (weight[chunk] if kept == BARE else 0))
            if state in (KEPT, BARE) and all(states[c] == DONE for c in range(n) if parent[c] == chunk):
                best = min(best, least((*states[:chunk], DONE, *states[chunk + 1 :])))
        return best

    return int(least((WAITING,) * n))


def every_cut(tree: Tree, chunk_size: int) -> Iterator[Branches]:
    """All ways to run a tree in chunks of at most `chunk_size` tokens, in which it attends to what has run."""
    n = tree.ids.size
    begin, length, parent = tree.begin.tolist(), tree.lengths.tolist(), tree.parent.tolist()

    def steps(done: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """How far sequences may be after another chunk."""
        ranges = [range(done[s], min(length[s], done[s] + chunk_size) + 1) for s in range(n)]
        for after in product(*ranges):
            run = sum(after) - sum(done)
            if 0 < run <= chunk_size and all(
                after[s] == begin[s] or parent[s] < 0 or after[parent[s]] >= begin[s] for s in range(n)
            ):
                yield after

    def cuts(done: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
        if list(done) == length:
            yield []
            return
        for after in steps(done):
            for rest in cuts(after):
                yield [after, *rest]

    for chunks in cuts(tuple(begin)):
        yield branches_of(tree, [tuple(begin), *chunks])


def branches_of(tree: Tree, progress: list[tuple[int, ...]]) -> Branches:
    """The parts between states of how far sequences are, with what depends on them, found token by token."""
    runs: list[tuple[int, int, int]] = []
    stops, part_of = [], {}
    for part, (before, after) in enumerate(pairwise(progress)):
        for sequence, (start, stop) in enumerate(zip(before, after, strict=True)):
            if stop > start:
                runs.append((sequence, start, stop))
                part_of.update({(sequence, token): part for token in range(start, stop)})
        stops.append(len(runs))
    last = list(range(len(stops)))
    for (sequence, token), part in part_of.items():
        for other, place in path(tree, sequence, token):
            last[part_of[other, place]] = max(last[part_of[other, place]], part)
    columns: Any = np.array(runs).T
    tokens = np.array([sum(after) - sum(before) for before, after in pairwise(progress)])
    return Branches(columns[0], columns[1], columns[2], np.array(stops), tokens, np.array(last))


def path(tree: Tree, sequence: int, token: int) -> Iterator[tuple[int, int]]:
    """Who runs each token before this one: (sequence, token)."""
    for place in range(token - 1, -1, -1):
        while place < tree.begin[sequence]:
            sequence = int(tree.parent[sequence])
        yield sequence, place
