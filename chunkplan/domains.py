"""Domains of values: one test with its error message, for typed options and entries of files alike."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

#: Counts of what is planned end here: they are 32-bit numbers in the files.
MOST = 2**31 - 1


@dataclass(frozen=True)
class Domain:
    """A domain of values.

    Attributes:
        holds: whether a value is one of them, once `load` has seen it.
        expected: what is expected, in words that follow "expected".
        read: the value that is typed as a text; raises ValueError where there is none.
        typed: what is typed, in words that follow "expected", where that is not the value itself.
        load: the value of an entry of JSON or TOML, or of an argument in Python; what is none is left as it is.
        metavar: what stands for it in the help, such as TOKENS.
        choices: the names it is one of, where these are all.
        completed: the names that a shell completes, where these are not all.
        example: a value as it is typed, where the expected ones do not show how.
        is_repeated: whether the flag is given once for each entry; `read` then takes the list of texts.
        is_written_too: whether a TOML file may have it as it is typed, in quotes.
    """

    holds: Callable[[Any], bool]
    expected: str
    read: Callable[[Any], Any] = str
    typed: str = ""
    load: Callable[[Any], Any] = lambda value: value
    metavar: str = "TEXT"
    choices: tuple[str, ...] = ()
    completed: tuple[str, ...] = ()
    example: str = ""
    is_repeated: bool = False
    is_written_too: bool = False


#: A dict of entries (one whose name ends in "?" may be missing), a list of one kind of entry, or a domain.
Expected: TypeAlias = "Mapping[str, Expected] | list[Expected] | Domain"


#: The largest whole number that a file holds: no bound that anybody needs to hear of.
_LARGEST = 2**63 - 1


def whole(least: int = 0, most: int = _LARGEST, *, metavar: str = "N") -> Domain:
    """A whole number from `least` to `most`."""
    return Domain(
        holds=lambda value: type(value) is int and least <= value <= most,
        expected=f"a whole number from {least}" + ("" if most == _LARGEST else f" to {most:,}"),
        read=_read_whole,
        metavar=metavar,
    )


def _read_whole(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", text.strip()):
        raise ValueError(text)
    return int(text)


#: K = 1024, as lengths of contexts are written: 8K is 8192.
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


def tokens(least: int = 1, most: int = MOST) -> Domain:
    """A number of tokens, also as 8k, 128K or 1M with K = 1024."""
    return replace(
        whole(least, most, metavar="TOKENS"),
        expected=f"a number of tokens from {least:,}, such as 8192, 8K or 1M",
        read=read_tokens,
        is_written_too=True,
    )


def read_tokens(text: str) -> int:
    """Read a number of tokens: "8192", "8k" and "8K" are 8192, "1M" is 1,048,576. Raises ValueError for other text."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([kKmM]?)", text.strip())
    number = float(match[1]) * _UNITS[match[2].lower()] if match else 0.5
    if not number.is_integer():
        raise ValueError(text)
    return int(number)


def number(holds: Callable[[float], bool], expected: str, *, metavar: str = "X") -> Domain:
    """A finite number of which `holds` is true."""
    return Domain(
        holds=lambda value: type(value) is float and math.isfinite(value) and holds(value),
        expected=expected,
        read=float,
        load=lambda value: float(value) if type(value) is int else value,
        metavar=metavar,
    )


def one_of(*choices: str, metavar: str = "NAME") -> Domain:
    """One of the names `choices`."""

    def read(typed: str) -> str:
        if typed not in choices:
            raise ValueError(typed)
        return typed

    return Domain(
        holds=lambda value: isinstance(value, str) and value in choices,
        expected=" or ".join(choices),
        read=read,
        metavar=metavar,
        choices=choices,
    )


def text(metavar: str, *, expected: str = "a string", completed: tuple[str, ...] = ()) -> Domain:
    """A string of any words."""
    return Domain(lambda value: isinstance(value, str), expected, metavar=metavar, completed=completed)


def path(metavar: str) -> Domain:
    """A path, also written as a string."""
    return Domain(
        holds=lambda value: isinstance(value, Path),
        expected="a path",
        read=Path,
        load=lambda value: Path(value) if isinstance(value, str) else value,
        metavar=metavar,
    )


def several(item: Domain, *, metavar: str = "", example: str = "") -> Domain:
    """A tuple of one or more values of `item`, typed with commas between."""

    def read(words: str) -> tuple[Any, ...]:
        return tuple(item.read(word.strip()) for word in words.split(",") if word.strip())

    return Domain(
        holds=lambda value: isinstance(value, tuple) and bool(value) and all(map(item.holds, value)),
        expected=f"{item.expected}, or several with commas between",
        read=read,
        load=lambda value: tuple(map(item.load, value)) if isinstance(value, (list, tuple)) else value,
        metavar=metavar or f"{item.metavar},...",
        completed=item.choices or item.completed,
        example=example,
    )


def or_null(expected: Domain) -> Domain:
    """`expected`, or null."""
    return replace(
        expected,
        holds=lambda value: value is None or expected.holds(value),
        expected=f"{expected.expected}, or null",
    )


#: True or false; of an option, a flag that is given or not.
FLAG = Domain(lambda value: type(value) is bool, "true or false", metavar="")

#: Strings and numbers of files.
TEXT = text("TEXT")
LINE = Domain(lambda value: isinstance(value, str) and "\n" not in value, "a string of one line")
PATH = Domain(lambda value: isinstance(value, str) and "\0" not in value, "a path")
NUMBER = Domain(lambda value: type(value) in (int, float) and 0 <= value < math.inf, "a number from 0")
WORDS = Domain(
    lambda value: isinstance(value, Mapping) and all(isinstance(word, str) for word in value.values()),
    "strings by name",
)
COUNTS = Domain(
    lambda value: isinstance(value, dict) and all(type(count) is int and count >= 0 for count in value.values()),
    "whole numbers by name",
)
COUNTS_OR_NULL = Domain(
    lambda value: isinstance(value, dict) and COUNTS.holds({name: 0 if n is None else n for name, n in value.items()}),
    "whole numbers or null by name",
)
SHARE = Domain(
    lambda value: type(value) is float and 0 < value < 1, "a share between 0 and 1", read=float, metavar="SHARE"
)


def or_word(word: str, expected: Domain) -> Domain:
    """`expected`, or `word`."""
    return replace(
        expected,
        holds=lambda value: value == word or expected.holds(value),
        expected=f"{word}, {expected.expected}",
        read=lambda typed: word if typed == word else expected.read(typed),
        completed=(word, *(expected.choices or expected.completed)),
    )


def find_mismatch(value: Any, expected: Expected, where: str = "") -> str | None:
    """An error message that names the entry of `value` that does not match, or None."""
    entry = f"`{where}`" if where else "the document"
    if isinstance(expected, Mapping):
        if not isinstance(value, dict):
            return f"{entry} is {_shown(value)}, expected an object"
        for key, inner in expected.items():
            name = key.removesuffix("?")
            below = f"{where}.{name}" if where else name
            if name not in value:
                if key.endswith("?"):
                    continue
                return f"`{below}` is missing"
            if found := find_mismatch(value[name], inner, below):
                return found
        return None
    if isinstance(expected, list):
        if not isinstance(value, list):
            return f"{entry} is {_shown(value)}, expected a list"
        mismatches = (find_mismatch(item, expected[0], f"{where}[{index}]") for index, item in enumerate(value))
        return next((found for found in mismatches if found), None)
    return None if expected.holds(expected.load(value)) else f"{entry} is {_shown(value)}, expected {expected.expected}"


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
