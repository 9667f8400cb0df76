"""Text from data, made safe for a terminal: nothing in it moves the cursor, hides, or looks like a mark of ours."""

from __future__ import annotations

import unicodedata

from rich.console import Console

#: Around runs of target tokens.
MARKS = ("⟦", "⟧")
_ASCII_MARKS = ("[[", "]]")

#: Controls, invisible characters and those that change direction, odd breaks of lines, halves of characters.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def marks(console: Console) -> tuple[str, str]:
    """What stands before and behind a run of target tokens."""
    return _ASCII_MARKS if console.options.ascii_only else MARKS


def visible(text: str, console: Console) -> str:
    """`text` with symbols for control characters, and its lines below each other; others of the kind, and `MARKS`, as
    `\\u27e6`; all that is not ASCII likewise where the terminal has no more."""
    shown = text.translate({ord(letter): _symbol(letter) for letter in set(text) if _is_odd(letter)})
    return shown.encode("ascii", "backslashreplace").decode() if console.options.ascii_only else shown


def _is_odd(letter: str) -> bool:
    return letter in MARKS or unicodedata.category(letter) in _HIDDEN


def _symbol(letter: str) -> str:
    code = ord(letter)
    if code < 0x20:
        return chr(0x2400 + code) + ("\n" if letter == "\n" else "")  # the block of control pictures
    return "\u2421" if code == 0x7F else letter.encode("ascii", "backslashreplace").decode()
