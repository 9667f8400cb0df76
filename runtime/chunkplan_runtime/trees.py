"""Trees: sequences of a step that begin alike, of which each token runs once (docs/plan-format.md).

The tokens of a tree are numbered as they run, from chunk to chunk. A sequence is a path in it: runs of tokens, of which
the last ones are its own, and those before are runs of other sequences.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from chunkplan.errors import DataError
from chunkplan.planfile.plan import VALIDATE_HINT, Chunk
from chunkplan_runtime.layout import Span


class TreePiece(NamedTuple):
    """Tokens [start, stop) of a tree, which are those of a sequence from `position` on."""

    start: int
    stop: int
    position: int

    @property
    def end(self) -> int:
        """One past the position of its last token."""
        return self.position + self.stop - self.start

    def within(self, position: int, end: int) -> TreePiece:
        """The part of it at the positions [position, end), of which there may be none."""
        first, last = max(self.position, position), min(self.end, end)
        return TreePiece(self.start + first - self.position, self.start + max(first, last) - self.position, first)


class TreeRun(NamedTuple):
    """A run of tokens, and the pieces of the tree `before` it in its sequence, by position, none of which go on."""

    piece: TreePiece
    before: tuple[TreePiece, ...]


@dataclass(frozen=True, eq=False)
class TreePart:
    """The `runs` of a tree in a chunk, side by side; `dependents`: where other parts begin that attend to any."""

    runs: tuple[TreeRun, ...]
    dependents: tuple[int, ...] = ()
    _visible: dict[tuple[int, int, int | None, int | None], tuple[Seen, ...]] = field(default_factory=dict, repr=False)
    _firsts: dict[tuple[int | None, int | None], int] = field(default_factory=dict, repr=False)

    def first_seen(self, window: int | None, tile: int | None) -> int:
        """The first token of the tree that one of it sees: in a `window` that ends with it, or its tile."""
        if (window, tile) not in self._firsts:  # of all layers alike, as what follows
            found = self.runs[0].piece.start
            for piece, before in self.runs:
                seen = _first_position(piece.position, window, tile)
                found = min([found, *(each.within(seen, each.end).start for each in before if each.end > seen)])
            self._firsts[window, tile] = found
        return self._firsts[window, tile]

    def sees(self, start: int, stop: int) -> bool:
        """True if tokens [start, stop) of the tree are in it, or before it in one of its sequences."""
        return any(first < stop and start < last for first, last in self._held)

    @cached_property
    def _held(self) -> list[tuple[int, int]]:
        """Tokens [start, stop) of the tree that are in it, or before it, ascending."""
        found: list[tuple[int, int]] = []
        for start, stop, _ in sorted({each for piece, before in self.runs for each in (*before, piece)}):
            if found and start <= found[-1][1]:
                found[-1] = found[-1][0], max(stop, found[-1][1])
            else:
                found.append((start, stop))
        return found

    def visible(self, start: int, stop: int, reach: int | None, tile: int | None) -> tuple[Seen, ...]:
        """Its tokens that see any of the tokens [start, stop), in as few pairs as there are, the part's own first.

        `reach`: how far before it a token sees at most; `tile`: see `_first_position`.
        """
        key = start, stop, reach, tile
        if key not in self._visible:
            self._visible[key] = tuple(_visible(self.runs, *key))
        return self._visible[key]


class Seen(NamedTuple):
    """Queries by their place in a part, keys by theirs in a block, and the `reach` and `borders` of their `Form`.

    With borders each query sees those at its place and before, up to a border; else all of the keys within reach.
    """

    queries: slice
    keys: slice
    reach: int | None
    borders: tuple[int, ...] | None


def _visible(runs: Sequence[TreeRun], start: int, stop: int, reach: int | None, tile: int | None) -> Iterator[Seen]:
    """Implements `TreePart.visible`."""
    first, last = runs[0].piece.start, runs[-1].piece.stop
    if start <= first < stop:
        cuts = [cut - first for piece, _ in runs for cut, _ in _cut(piece, tile)]
        yield Seen(slice(0, last - first), slice(first - start, last - start), reach, (*cuts, last - first))
    if reach is None and tile is None:
        yield from _rectangles(runs, start, stop)
        return
    for piece, before in runs:
        for query_start, queries in _cut(piece, tile):
            least = _first_position(queries.position, None, tile)
            for each in before:
                # Keys in the block, and after the beginning of the tile.
                held = each.within(max(each.position + start - each.start, least), each.position + stop - each.start)
                end = queries.end if reach is None else min(queries.end, held.end + reach)
                if held.start >= held.stop or queries.position >= end:
                    continue
                # Queries end `end - held.end` positions after the keys do, so that they reach less far in these.
                left = None if reach is None or end - 1 - reach <= held.position else reach - (end - held.end)
                begin = query_start - first
                rows = slice(begin, begin + end - queries.position)
                yield Seen(rows, slice(held.start - start, held.stop - start), left, None)


def _cut(piece: TreePiece, tile: int | None) -> Iterator[tuple[int, TreePiece]]:
    """The pieces of a piece that is cut at the borders of tiles of its sequence, and where each begins in the tree."""
    position = piece.position
    while position < piece.end:
        end = piece.end if tile is None else min(piece.end, (position // tile + 1) * tile)
        part = piece.within(position, end)
        yield part.start, part
        position = end


def _rectangles(runs: Sequence[TreeRun], start: int, stop: int) -> Iterator[Seen]:
    """Queries side by side that see the same keys side by side in a block, which are all before them."""
    first = runs[0].piece.start
    seen = [(run, max(each.start, start), min(each.stop, stop)) for run in runs for each in run.before]
    seen = [each for each in seen if each[1] < each[2]]
    edges = sorted({edge for _, *span in seen for edge in span})
    found: dict[tuple[int, int], list[int]] = {}  # by queries, those keys that end last
    for low, high in pairwise(edges):
        queries: list[list[int]] = []
        for run, begin, end in seen:
            if begin <= low and high <= end:
                if queries and queries[-1][1] == run.piece.start - first:
                    queries[-1][1] = run.piece.stop - first
                else:
                    queries.append([run.piece.start - first, run.piece.stop - first])
        for one, other in queries:
            keys = found.setdefault((one, other), [low, low])
            if keys[1] != low:
                yield Seen(slice(one, other), slice(keys[0] - start, keys[1] - start), None, None)
                keys[0] = low
            keys[1] = high
    for (one, other), (low, high) in found.items():
        yield Seen(slice(one, other), slice(low - start, high - start), None, None)


def _first_position(position: int, window: int | None, tile: int | None) -> int:
    """The first position of its sequence that a token at `position` sees, in a `window` or in tiles of so many."""
    if tile is not None:
        return position // tile * tile
    return 0 if window is None else max(0, position - window + 1)


class Joined(NamedTuple):
    """The spans of a chunk in which attention takes it, and those of other sequences that begin with its tokens."""

    attended: tuple[Span, ...]
    begun: tuple[Span, ...]


#: Of each sequence that begins in another one, the other one and how many of its tokens.
Prefixes = Mapping[int, tuple[int, int]]


def join_trees(chunks: Sequence[Chunk], spans: Mapping[int, Sequence[Span]], prefixes: Prefixes) -> dict[int, Joined]:
    """The chunks of a rank that hold trees, by chunk_id, each tree as one span of it; `spans` are their segments.

    Raises DataError: tokens that a part of a tree goes on with are not in the tree before it.
    """
    found: dict[int, Joined] = {}
    groups: dict[int, list[tuple[int, Span]]] = {}
    for chunk in sorted(chunks, key=lambda chunk: chunk.group_index):
        placed = [(chunk.chunk_id, span) for span in spans[chunk.chunk_id]]
        if chunk.group_id is not None:
            groups.setdefault(chunk.group_id, []).extend(placed)
            continue
        firsts = [place for place, (_, span) in enumerate(placed) if not span.start]
        joined = [_joined(placed[first:stop], prefixes) for first, stop in pairwise((*firsts, len(placed)))]
        if any(each[chunk.chunk_id].begun for each in joined):
            attended, begun = (sum(each, ()) for each in zip(*(each[chunk.chunk_id] for each in joined), strict=True))
            found[chunk.chunk_id] = Joined(attended, begun)
    for placed in groups.values():
        first_tokens = {span.sequence_id: span.start for _, span in reversed(placed)}
        if any(first_tokens.values()):
            found |= _joined(placed, prefixes)
    return found


def _joined(placed: Sequence[tuple[int, Span]], prefixes: Prefixes) -> dict[int, Joined]:
    """A tree of these segments as attention and losses see it, by chunk_id; no tree if it is one segment."""
    own: dict[int, list[TreePiece]] = {}  # by sequence
    runs: dict[int, list[TreeRun]] = {}  # by chunk, as what follows
    begun: dict[int, list[Span]] = {chunk_id: [] for chunk_id, _ in placed}
    starts, stop = list[int](), 0  # of the segments
    for chunk_id, span in placed:
        before = _path(own, prefixes, span.sequence_id, span.start)
        if before is None:
            message = f"tokens before {span.start} of sequence {span.sequence_id} are not in the tree before it"
            raise DataError(message, where=f"chunk {chunk_id}", hint=VALIDATE_HINT)
        for piece in () if span.sequence_id in own else before:
            of_chunk, of_run = placed[place := bisect_right(starts, piece.start) - 1]
            chunk_start = of_run.chunk_start + piece.start - starts[place]
            shared = span._replace(start=piece.position, stop=piece.end, chunk_start=chunk_start)
            begun[of_chunk].append(shared)
        run = TreeRun(TreePiece(stop, stop + span.stop - span.start, span.start), tuple(_merged(before)))
        own.setdefault(span.sequence_id, []).append(run.piece)
        runs.setdefault(chunk_id, []).append(run)
        starts.append(stop)
        stop = run.piece.stop
    if len(placed) == 1:
        return {chunk_id: Joined((span,), ()) for chunk_id, span in placed}
    edges = [*(each[0].piece.start for each in runs.values()), stop]  # of the parts
    dependents = _dependents(edges, runs.values())
    root, found = placed[0][1], {}
    first_spans = dict(reversed(placed))
    for (chunk_id, own_runs), span_of, attending in zip(runs.items(), pairwise(edges), dependents, strict=True):
        chunk_start, part = first_spans[chunk_id].chunk_start, TreePart(tuple(own_runs), tuple(sorted(attending)))
        span = Span(root.sequence_id, *span_of, stop, chunk_start, root.group_id, part)
        found[chunk_id] = Joined((span,), tuple(begun[chunk_id]))
    return found


def _path(
    own: Mapping[int, list[TreePiece]], prefixes: Prefixes, sequence_id: int, stop: int
) -> list[TreePiece] | None:
    """The pieces that have the first `stop` tokens of a sequence, of those that each has; None if some have none."""
    path: list[TreePiece] = []
    for _ in range(len(prefixes) + 1):
        for piece in reversed(own.get(sequence_id, [])):
            if piece.position < stop:
                if piece.end < stop:
                    return None
                path.append(piece.within(0, stop))
                stop = piece.position
        if not stop or sequence_id not in prefixes:
            break
        sequence_id = prefixes[sequence_id][0]
    return None if stop else path[::-1]


def _dependents(edges: Sequence[int], parts: Iterable[Sequence[TreeRun]]) -> list[set[int]]:
    """The parts that attend to any of a part's tokens, by where they begin; all parts begin at `edges`."""
    found: list[set[int]] = [set() for _ in edges[:-1]]
    for place, runs in enumerate(parts):
        for piece in (each for run in runs for each in run.before):
            for seen in range(bisect_right(edges, piece.start) - 1, place):
                if edges[seen] < piece.stop:
                    found[seen].add(edges[place])
    return found


def _merged(pieces: Sequence[TreePiece]) -> Iterator[TreePiece]:
    """Pieces of one sequence, with those in one that go on with each other."""
    last = None
    for piece in pieces:
        if last is not None and (last.stop, last.end) == (piece.start, piece.position):
            last = TreePiece(last.start, piece.stop, last.position)
        else:
            yield from () if last is None else (last,)
            last = piece
    yield from () if last is None else (last,)
