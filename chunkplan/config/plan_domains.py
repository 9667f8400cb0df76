"""What some entries of a plan's configuration may be: K by length, who shares a sequence, what is held out, weights."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from chunkplan.domains import MOST, Domain, read_tokens
from chunkplan.errors import UsageError

#: Far beyond any cluster; a plan has rows for every rank and stage.
MAX_DP, MAX_PP, MAX_VIRTUAL, MAX_LAYERS = 1 << 16, 1 << 10, 1 << 6, 1 << 16

#: Pairs of tokens and K: of sequences longer than that many tokens, K in place of `k`.
KByLength = tuple[tuple[int, int], ...]


def _is_k_by_length(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
        and all(type(number) is int and 1 <= number <= MOST for pair in value for number in pair)
        and all(before[0] < after[0] for before, after in pairwise(value))
    )


def _load_pairs(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(tuple(pair) if isinstance(pair, (list, tuple)) else pair for pair in value) or None


def read_k(typed: str) -> dict[str, int | KByLength | None]:
    """K of "4", and of "4,128K:2" also the pairs of tokens and K for longer sequences.

    Raises:
        ValueError: it is neither.
    """
    first, *others = typed.split(",")
    pairs = [(read_tokens(tokens), int(k)) for tokens, k in (other.split(":") for other in others)]
    return {"k": int(first), "k_by_length": _load_pairs(pairs)}


def _read_number(typed: str) -> int | float:
    """A whole number where it is written as one."""
    return int(typed) if typed.isdecimal() else float(typed)


def _read_weights(typed: list[str]) -> dict[str, int | float]:
    """The weight of each source, as typed: {"code.jsonl": 2} for ["code.jsonl=2"]."""
    weights: dict[str, int | float] = {}
    for words in typed:
        source, equals, weight = words.rpartition("=")
        if not equals or not source:
            raise ValueError(words)
        if source in weights:
            raise UsageError(f"{source} has two weights", hint="name every source at most once")
        weights[source] = _read_number(weight)
    return weights


def _read_cp(typed: str) -> str | int:
    return int(typed) if typed.isdecimal() else typed


def _is_cp(value: Any) -> bool:
    return value in ("auto", "off") if isinstance(value, str) else type(value) is int and 2 <= value <= MAX_DP


CP = Domain(
    holds=_is_cp,
    expected=f"auto, off, or a whole number from 2 to {MAX_DP:,}",
    read=_read_cp,
    metavar="auto|off|N",
    completed=("auto", "off"),
    example="auto",
)
K = Domain(
    holds=lambda value: type(value) is int and 1 <= value <= MOST,
    expected=f"a whole number from 1 to {MOST:,}",
    read=read_k,
    typed="a number, or also TOKENS:K as in 8,131072:2",
    metavar="N",
)
K_BY_LENGTH = Domain(_is_k_by_length, "pairs of tokens and K, both from 1, tokens ascending", load=_load_pairs)
HOLDOUT = Domain(
    holds=lambda value: (type(value) is int and value >= 1) or (type(value) is float and 0 < value < 1),
    expected="a share between 0 and 1, or a whole number of sequences from 1",
    read=_read_number,
    metavar="SHARE|N",
    example="0.01",
)
WEIGHTS = Domain(
    holds=lambda value: isinstance(value, Mapping) and all(isinstance(source, str) for source in value),
    expected="weights by source",
    read=_read_weights,
    typed="SOURCE=X",
    metavar="SOURCE=X",
    example="code.jsonl=2",
    is_repeated=True,
)
