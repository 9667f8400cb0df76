"""Sequences that begin alike, and plans by hand that run what they have in common once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import HandmadePlan, Piece, Tree

#: Token ids and target mask.
Sample = tuple[Any, Any]


def random_samples(
    chance: random.Random, levels: int, branches: int, shortest: int = 2, longest: int = 9
) -> list[Sample]:
    """The leaves of a tree of some levels, each of up to so many branches, in preorder of it, and two at its root."""
    sizes = np.random.default_rng(chance.randrange(2**32))

    def grow(ids: list[int], target: list[bool], level: int) -> list[tuple[list[int], list[bool]]]:
        length = chance.randint(shortest, longest)
        ids = ids + sizes.integers(0, 97, length).tolist()
        target = target + (sizes.random(length) < 0.6).tolist()
        if level == levels:
            return [(ids, target)]
        return [leaf for _ in range(chance.randint(1 + (not level), branches)) for leaf in grow(ids, target, level + 1)]

    leaves = sorted(grow([], [], 0))
    return [(np.array(ids), np.array([False, *target[1:]])) for ids, target in leaves]


def prefixes_of(samples: Sequence[Sample], first: int = 0) -> dict[int, tuple[int, int]]:
    """Of sorted sequences, numbered from `first` on, each begins in the one before it as far as they are alike."""
    found = {}
    for number, ((ids, target), (other_ids, other_target)) in enumerate(pairwise(samples), first + 1):
        common = min(len(ids), len(other_ids))
        same = (ids[:common] == other_ids[:common]) & (target[:common] == other_target[:common])
        if (alike := int(np.argmin(same)) if not same.all() else common) > 1:
            found[number] = number - 1, alike - 1
    return found


def segments_of(samples: Sequence[Sample], prefixes: dict[int, tuple[int, int]], first: int = 0) -> list[Piece]:
    """What each has of its own."""
    return [(n, prefixes.get(n, (0, 0))[1], len(ids)) for n, (ids, _) in enumerate(samples, first)]


def cut(segments: Sequence[Piece], chunk_size: int) -> list[list[Piece]]:
    """Chunks of so many tokens, one after another."""
    chunks: list[list[Piece]] = [[]]
    for sequence, start, end in segments:
        while start < end:
            room = chunk_size - sum(stop - begin for _, begin, stop in chunks[-1])
            if not room:
                chunks.append([])
                continue
            chunks[-1].append((sequence, start, min(end, start + room)))
            start = min(end, start + room)
    return chunks


def tree_of(
    chunks: Sequence[Sequence[Piece]], prefixes: dict[int, tuple[int, int]], keeps: Sequence[bool], last: int = 0
) -> tuple[Tree, list[tuple[str, int]]]:
    """The columns of chunks that are a group of one tree but for the `last` ones, and their actions depth first."""
    size = len(chunks) - last
    seen = [{place for piece in chunk for place in _tokens_before(piece, prefixes)} for chunk in chunks]
    own = [{(number, token) for number, start, end in chunk for token in range(start, end)} for chunk in chunks]
    columns: dict[int, dict[str, Any]] = {}
    attending: dict[int, list[int]] = {}
    actions: list[tuple[str, int]] = []
    stack: list[int] = []
    before = 0
    for number, chunk in enumerate(chunks):
        attending[number] = dependents = [other for other in range(number + 1, size) if seen[other] & own[number]]
        in_group = number < size and size > 1
        columns[number] = {
            "group_id": 0 if in_group else None,
            "group_index": number if in_group else 0,
            "group_size": size if in_group else 1,
            "prefix_tokens": before if in_group else 0,
            "keeps_activations": keeps[number] or not dependents,
            "last_dependent": max(dependents, default=number if in_group else 0),
        }
        before += sum(end - start for _, start, end in chunk)
        actions.append(("forward" if columns[number]["keeps_activations"] else "forward_kv", number))
        stack.append(number)
        while stack and max(columns[stack[-1]]["last_dependent"], stack[-1]) <= number:
            top = stack.pop()
            actions += [] if columns[top]["keeps_activations"] else [("recompute", top)]
            actions.append(("backward", top))
    return Tree(prefixes, columns, attending), actions


def run_ahead(chance: random.Random, tree: Tree, actions: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """The same in another order, with backwards some time after those that depend on them, as on a pipeline."""
    forwards = [action for action in actions if action[0].startswith("forward")]
    columns, done, found = tree.columns, set[int](), list[tuple[str, int]]()
    while len(done) < len(columns):
        begun = {number for op, number in found if op.startswith("forward")}
        ready = [
            number
            for number in begun - done
            if begun.issuperset(own := tree.dependents[number]) and done.issuperset(own)
        ]
        if forwards and (not ready or chance.random() < 0.6):
            found.append(forwards.pop(0))
            continue
        number = chance.choice(ready)
        found += [] if columns[number]["keeps_activations"] else [("recompute", number)]
        found.append(("backward", number))
        done.add(number)
    return found


def _tokens_before(piece: Piece, prefixes: dict[int, tuple[int, int]]) -> list[tuple[int, int]]:
    """The tokens before a piece of a sequence, as (the sequence that runs it, position)."""
    sequence, stop, _ = piece
    found = []
    while stop:
        other, tokens = prefixes.get(sequence, (0, 0))
        found += [(sequence, token) for token in range(min(tokens, stop), stop)]
        sequence, stop = other, min(tokens, stop)
    return found


def random_tree_plan(
    chance: random.Random, handmade_plan: HandmadePlan, chunk_size: int | None = None
) -> tuple[Path, Path]:
    """A plan and its analysis: one tree in a group of chunks, or two in one chunk, and sequences beside them."""
    samples = random_samples(chance, chance.randint(1, 3), 3)
    prefixes = prefixes_of(samples)
    chunk_size = chunk_size or chance.choice([3, 5, 8, 16, 1000])
    chunks = cut(segments_of(samples, prefixes), chunk_size)
    alone = random_samples(chance, 0, 1)
    last: list[list[Piece]] = [segments_of(alone, {}, len(samples))]
    samples = samples + alone
    if chance.random() < 0.5:
        more = random_samples(chance, chance.randint(1, 2), 3)
        of_more = prefixes_of(more, len(samples))
        last[0] += segments_of(more, of_more, len(samples))
        samples, prefixes = samples + more, prefixes | of_more
    if len(chunks) == 1:
        chunks, last = [[*last[0], *chunks[0]]], []
    keeps = [chance.random() < 0.5 for _ in (*chunks, *last)]
    tree, actions = tree_of([*chunks, *last], prefixes, keeps, len(last))
    if chance.random() < 0.5:
        actions = run_ahead(chance, tree, actions)
    return handmade_plan(samples, [{0: [*chunks, *last]}], actions=actions, tree=tree)
