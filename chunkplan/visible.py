"""Text from data, made safe to be shown: nothing in it moves a cursor, hides, or changes the direction of the rest."""

from __future__ import annotations

import unicodedata

#: Controls, invisible characters and those that change direction, odd breaks of lines, halves of characters.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def visible(text: str, *, marks: tuple[str, ...] = ()) -> str:
    """`text` with symbols for control characters, and its lines below each other; others of the kind, and `marks`, as
    `\\u27e6`."""
    return text.translate({ord(letter): _symbol(letter) for letter in set(text) if letter in marks or _is_odd(letter)})


def _is_odd(letter: str) -> bool:
    return unicodedata.category(letter) in _HIDDEN


def _symbol(letter: str) -> str:
    code = ord(letter)
    if code < 0x20:
        return chr(0x2400 + code) + ("\n" if letter == "\n" else "")  # the block of control pictures
    return "\u2421" if code == 0x7F else letter.encode("ascii", "backslashreplace").decode()
