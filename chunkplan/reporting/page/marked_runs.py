"""Decoded text as runs of a page: what is a target, what a special token, and what is left out."""

from __future__ import annotations

from collections.abc import Iterator

from chunkplan.quantities import counted
from chunkplan.reporting.token_text import SequenceText, TextPiece
from chunkplan.visible import visible

#: How a page shows what is trained, in words.
HOW_MARKED = "What counts in the loss has a background, special tokens are bold."

#: The symbol of a line end, and one that more fonts have.
_LINE_END = "\u240a", "\u21b5"


def marked_runs(text: SequenceText) -> Iterator[tuple[str, str]]:
    """Yield the runs of a `MarkedText`."""
    yield from map(_run, text.first)
    if text.num_left_out:
        targets = counted(text.num_targets_left_out, "target")
        yield f"\n... {counted(text.num_left_out, 'token')} left out here, {targets} among them ...\n", "note"
    yield from map(_run, text.last)


def _run(piece: TextPiece) -> tuple[str, str]:
    kinds = [*(["special"] if piece.is_special else []), *(["target"] if piece.is_target else [])]
    return visible(piece.text).replace(*_LINE_END), " ".join(kinds)
