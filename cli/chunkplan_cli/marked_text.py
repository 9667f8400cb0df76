"""Decoded tokens in the terminal: targets marked, with colour and without; special tokens in a style of their own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from chunkplan.quantities import counted
from chunkplan_cli.terminal import marks, visible

if TYPE_CHECKING:
    from chunkplan.reporting.token_text import SequenceText, TextPiece


def marks_note(console: Console) -> Text:
    """Return the line that says how targets are marked."""
    before, behind = marks(console)
    return Text(f"{before}targets{behind} are marked.", style="dim")


def print_marked(console: Console, text: SequenceText, shows_all: str) -> None:
    """Print what a sequence says, and how many tokens are left out in its middle; `shows_all` names the option that
    shows them."""
    console.print(marked(console, text.first), overflow="fold")
    if text.num_left_out:
        targets = counted(text.num_targets_left_out, "target")
        left_out = f"{counted(text.num_left_out, 'token')} left out here, {targets} among them"
        console.print(Text(f"... {left_out}; {shows_all} shows all ...", style="dim"))
        console.print(marked(console, text.last), overflow="fold")


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
