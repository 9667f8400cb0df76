"""Text from data, made safe for a terminal: nothing in it moves the cursor, hides, or looks like a mark of ours."""

from __future__ import annotations

from rich.console import Console

from chunkplan.visible import visible as without_controls

#: Around runs of target tokens.
MARKS = ("⟦", "⟧")
_ASCII_MARKS = ("[[", "]]")


def marks(console: Console) -> tuple[str, str]:
    """What stands before and behind a run of target tokens."""
    return _ASCII_MARKS if console.options.ascii_only else MARKS


def visible(text: str, console: Console) -> str:
    """`text` as `chunkplan.visible` has it, `MARKS` as codes too; all that is not ASCII likewise where the terminal has
    no more."""
    shown = without_controls(text, marks=MARKS)
    return shown.encode("ascii", "backslashreplace").decode() if console.options.ascii_only else shown
