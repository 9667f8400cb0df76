"""Decoded tokens in the terminal: targets marked, with colour and without; special tokens in a style of their own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from chunkplan_cli.terminal import marks, visible

if TYPE_CHECKING:
    from chunkplan.reporting.token_text import TextPiece


def marks_note(console: Console) -> Text:
    """Return the line that says how targets are marked."""
    before, behind = marks(console)
    return Text(f"{before}targets{behind} are marked.", style="dim")


def marked(console: Console, pieces: Sequence[TextPiece]) -> Text:
    """Return what the pieces say, with marks around each run of targets."""
    before, behind = marks(console)
    text = Text()
    for is_target, run in groupby(pieces, lambda piece: piece.is_target):
        style = "green" if is_target else ""
        text.append(before if is_target else "", style=style)
        for piece in run:
            text.append(visible(piece.text, console), style=f"bold {style or 'cyan'}" if piece.is_special else style)
        text.append(behind if is_target else "", style=style)
    return text
