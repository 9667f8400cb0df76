"""Options of the intake, from strings to values."""

from __future__ import annotations

import re
from collections.abc import Sequence

from chunkplan.errors import UsageError


def parse_columns(columns: Sequence[str], length_column: str | None) -> dict[str, str]:
    """ROLE=KEY for each role, and `length` for the key of lengths.

    Raises:
        UsageError: one is not ROLE=KEY, or a role is there twice.
    """
    parsed: dict[str, str] = {}
    for text in [*columns, *([f"length={length_column}"] if length_column else [])]:
        role, sign, key = text.partition("=")
        if not (role and sign and key):
            raise UsageError(f"--column {text!r}, expected ROLE=KEY", hint="for example --column text=body")
        if role in parsed:
            raise UsageError(f"two columns for the role {role}", hint="give every role at most once")
        parsed[role] = key
    return parsed


def parse_shard(text: str) -> tuple[int, int]:
    """I/N.

    Raises:
        UsageError: it is not that.
    """
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {text!r}, expected I/N", hint="for example --shard 1/8 to --shard 8/8")
    return int(match[1]), int(match[2])


def parse_megabytes(number: float) -> int:
    """Bytes.

    Raises:
        UsageError: it is no number of megabytes that there could be.
    """
    if not 1e-6 <= number < 1e9:
        raise UsageError(f"--max-record-mb is {number:g}, expected megabytes above 0", hint="give a number such as 16")
    return round(number * 1_000_000)
