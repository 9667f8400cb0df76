"""Where the segments of a chunk lie in their sequences and in the chunk."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Where a segment lies: tokens [start, end) of a sequence of `length` are tokens [first, last) of its chunk.

    `group_id` is that of the chunk.
    """

    sequence_id: int
    start: int
    end: int
    length: int
    first: int
    group_id: int | None = None

    @property
    def last(self) -> int:
        """One past the segment's last token in the chunk."""
        return self.first + self.end - self.start

    @property
    def is_split(self) -> bool:
        """Whether the sequence has tokens in other chunks too."""
        return self.end - self.start < self.length

    def first_seen(self, window: int | None) -> int:
        """The first token of the sequence that a token of the segment sees; `window`: how many each does, None: all."""
        return 0 if window is None else max(0, self.start - window + 1)

    @property
    def occurrence(self) -> tuple[int, int | None]:
        """Tells a split sequence in flight from any other, also from itself where a step has it more than once."""
        return self.sequence_id, self.group_id
