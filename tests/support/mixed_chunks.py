"""Chunks that a planner would not make: parts and short sequences side by side, also in the middle of a group."""

from __future__ import annotations

LENGTHS = [23, 5, 9, 3, 30, 1, 8]

#: Sequence 0 and 4 are split; 0 has one mixed chunk in its middle and one at its end, where the part is not first.
MIXED = [
    [(0, 0, 8)],
    [(0, 8, 11), (1, 0, 5)],
    [(3, 0, 3), (0, 11, 23), (5, 0, 1)],
    [(2, 0, 9), (6, 0, 8)],
    [(4, 0, 13)],
    [(4, 13, 14)],
    [(4, 14, 30)],
]
