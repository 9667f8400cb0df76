"""Where the segments of a chunk lie in their sequences and in the chunk."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Where a segment lies: tokens [start, stop) of a sequence of `length` are [chunk_start, chunk_stop) of its chunk.

    `group_id` is that of the chunk.
    """

    sequence_id: int
    start: int
    stop: int
    length: int
    chunk_start: int
    group_id: int | None = None

    @property
    def chunk_stop(self) -> int:
        """One past the segment's last token in the chunk."""
        return self.chunk_start + self.stop - self.start

    @property
    def is_split(self) -> bool:
        """Whether the sequence has tokens in other chunks too."""
        return self.stop - self.start < self.length

    def first_seen(self, window: int | None, tile: int | None = None) -> int:
        """The first token of the sequence that a token of the segment sees.

        `window` is how many tokens each sees, itself included; None: all before it. `tile`: those before it in its own
        tile, of which a sequence has one every so many tokens.
        """
        if tile is not None:
            return self.start // tile * tile
        return 0 if window is None else max(0, self.start - window + 1)

    @property
    def occurrence(self) -> tuple[int, int | None]:
        """A key of a split sequence in flight that no other one has, nor itself where a step has it twice."""
        return self.sequence_id, self.group_id
