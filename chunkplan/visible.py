"""Text from data, made safe to be shown: nothing in it moves a cursor, hides, or changes the direction of the rest."""

from __future__ import annotations

import re
import unicodedata

#: Controls, invisible characters and those that change direction, odd breaks of lines, halves of characters.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")

#: What moves the cursor, sets colours or asks the terminal for something: all controls but line ends and tabs; and what
#: turns the direction of what follows.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """Return `text` with a question mark for each character that would steer a terminal. Its lines stay."""
    return _STEERING.sub("?", text)


def one_line(text: str) -> str:
    """Return `harmless` text on one line: a name in it cannot begin a line that looks like one of ours."""
    return harmless(text).replace("\n", "?")


def visible(text: str, *, marks: tuple[str, ...] = ()) -> str:
    """Return `text` with symbols for control characters, and its lines below each other.

    Other hidden characters, and `marks`, become codes such as `\\u27e6`.
    """
    return text.translate({ord(letter): _symbol(letter) for letter in set(text) if letter in marks or _is_odd(letter)})


def _is_odd(letter: str) -> bool:
    return unicodedata.category(letter) in _HIDDEN


def _symbol(letter: str) -> str:
    code = ord(letter)
    if code < 0x20:
        return chr(0x2400 + code) + ("\n" if letter == "\n" else "")  # the block of control pictures
    return "\u2421" if code == 0x7F else letter.encode("ascii", "backslashreplace").decode()
