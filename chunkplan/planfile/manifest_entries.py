"""What a manifest has to hold: every entry that a reader relies on, with what it may be.

A manifest may come from anywhere. It is checked here once, when it is read, so that nothing behind has to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

#: Whether a value will do, and the words for what is expected.
Test = tuple[Callable[[Any], bool], str]

#: A dict of entries (one whose name ends in "?" may be missing), a list of one kind of entry, or a test.
Expected = dict[str, Any] | list[Any] | Test

#: Far beyond any cluster; a plan has rows for every rank and stage.
MAX_DP, MAX_PP, MAX_VIRTUAL = 1 << 16, 1 << 10, 1 << 6
_PART_FILE = re.compile(r"tokens/part-\d{5,9}\.arrow")


def whole(least: int = 0, most: int = 2**63 - 1) -> Test:
    """A whole number from `least` to `most`."""
    return lambda value: type(value) is int and least <= value <= most, f"a whole number from {least} to {most}"


def or_null(expected: Test) -> Test:
    """`expected`, or null."""
    test, words = expected
    return lambda value: value is None or test(value), f"{words}, or null"


TEXT = (lambda value: isinstance(value, str), "a string")
LINE = (lambda value: isinstance(value, str) and "\n" not in value, "a string of one line")
PATH = (lambda value: isinstance(value, str) and "\0" not in value, "a path")
FLAG = (lambda value: isinstance(value, bool), "true or false")
NUMBER = (lambda value: type(value) in (int, float) and 0 <= value < math.inf, "a number from 0")
COUNTS = (
    lambda value: isinstance(value, dict) and all(type(count) is int and count >= 0 for count in value.values()),
    "whole numbers by name",
)
COUNTS_OR_NULL = (
    lambda value: isinstance(value, dict) and COUNTS[0]({name: 0 if n is None else n for name, n in value.items()}),
    "whole numbers or null by name",
)
PART_FILE = (
    lambda value: isinstance(value, str) and _PART_FILE.fullmatch(value) is not None,
    "the name of a part file in tokens/",
)
WORDS = (
    lambda value: isinstance(value, dict) and all(isinstance(word, str) for word in value.values()),
    "strings by name",
)
TOKENIZER = (
    lambda value: isinstance(value, dict) and find_mismatch(value, _TOKENIZER) is None,
    "an object with `path` and `content_hash`, strings, and maybe `vocab_size` and `eos_token`",
)
SHARE = (lambda value: type(value) is float and 0 < value < 1, "a share between 0 and 1")
HOLDOUT = (
    lambda value: (type(value) is int and value >= 1) or (type(value) is float and 0 < value < 1),
    "a share between 0 and 1, or a whole number from 1",
)
WEIGHTS = (
    lambda value: isinstance(value, dict) and all(NUMBER[0](weight) for weight in value.values()),
    "numbers from 0 by name",
)

K_BY_LENGTH = (
    lambda value: (
        isinstance(value, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
        and all(type(number) is int and 1 <= number < 2**31 for pair in value for number in pair)
        and all(before[0] < after[0] for before, after in pairwise(value))
    ),
    "pairs of tokens and K, both from 1, tokens ascending",
)


def one_of(*choices: str) -> Test:
    """One of some strings."""
    return lambda value: isinstance(value, str) and value in choices, " or ".join(f'"{choice}"' for choice in choices)


_TOKENIZER: Expected = {
    "path": PATH,
    "content_hash": TEXT,
    "vocab_size?": or_null(whole()),
    "eos_token?": or_null(TEXT),
}
ANALYSIS: Expected = {
    "tool_version": TEXT,
    "content_hash": TEXT,
    "content_hashes": {"sequences": TEXT, "tokens?": TEXT},
    "totals": COUNTS,
    "sources": [
        {
            "path": LINE,
            "format?": TEXT,
            "compression?": or_null(TEXT),
            "schema": or_null(TEXT),
            "columns?": or_null(WORDS),
            "evidence?": or_null(TEXT),
            "bytes?": or_null(whole()),
            "content_hash?": TEXT,
            "records": whole(),
            "rejected?": whole(),
            "reasons?": COUNTS,
            "not_sampled?": whole(),
            "first_sequence_id?": whole(),
            "num_sequences?": whole(),
            "num_tokens?": whole(),
            "unread_keys?": COUNTS_OR_NULL,
            "num_unread_keys?": whole(),
        }
    ],
    "exact": FLAG,
    "sample": or_null(SHARE),
    "rejected": COUNTS,
    "truncated": {"num_sequences": whole(), "num_tokens": whole()},
    "max_token_id": or_null(whole()),
    "tokenizer?": or_null(TOKENIZER),
    "template_hash?": or_null(TEXT),
    "options?": {
        "schema?": or_null(TEXT),
        "columns?": WORDS,
        "max_length?": or_null(whole(1)),
        "long?": TEXT,
        "on_error?": TEXT,
        "undesirable?": TEXT,
        "tokens?": FLAG,
        "sample?": or_null(SHARE),
        "max_record_bytes?": whole(1),
    },
    "tokens": [{"file": PART_FILE, "first_sequence_id": whole(), "rows": [whole(1)]}],
}

_SELECTED: dict[str, Any] = {"num_sequences": whole(), "num_held_out": whole(), "num_occurrences": whole()}
PLAN: Expected = {
    "tool_version": TEXT,
    "content_hash": TEXT,
    "content_hashes": {"config": TEXT, "steps": TEXT, "chunks": TEXT, "schedule": TEXT},
    "config": {
        "chunk_size": whole(1),
        "k": whole(1),
        "k_by_length": or_null(K_BY_LENGTH),
        "global_batch": whole(1),
        "epochs": whole(1),
        "last_batch": one_of("keep", "drop"),
        "dp": whole(1, MAX_DP),
        "pp": whole(1, MAX_PP),
        "schedule": TEXT,
        "virtual_stages": whole(1, MAX_VIRTUAL),
        "memory_tokens": or_null(whole(1)),
        "seed": whole(),
        "split": one_of("full", "even", "cost", "none"),
        "tail_sharing": FLAG,
        "packing": TEXT,
        "balance": one_of("spread", "search"),
        "equal_chunks": FLAG,
        "holdout": or_null(HOLDOUT),
        "part": one_of("train", "eval"),
        "mix": or_null(WEIGHTS),
    },
    "analysis": {"path": PATH, "content_hash": TEXT, "exact": FLAG, "sample?": or_null(SHARE)},
    "selection": {**_SELECTED, "sources": [{"path": LINE, **_SELECTED}]},
    "totals": {
        "num_steps": whole(),
        "num_chunks": whole(),
        "num_sequences": whole(),
        "num_tokens": whole(),
        "num_target_tokens": whole(),
        "longest_sequence": whole(),
        "num_dropped_sequences": whole(),
    },
    "predictions": {
        "cost_model": {
            "shape": {"name": TEXT, "num_layers": whole(1), "max_positions?": or_null(whole(1))},
            "hardware": {"name": TEXT},
            "tp": whole(1),
            "checkpointing": TEXT,
            "kv_offload": FLAG,
        },
        "predicted_us": NUMBER,
        "lower_bound_us": NUMBER,
    },
}


def find_mismatch(value: Any, expected: Expected, path: str = "") -> str | None:
    """What is wrong with `value`, in words that name the entry, or None."""
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            return f"`{path}` is {_shown(value)}, expected an object"
        for key, inner in expected.items():
            name = key.removesuffix("?")
            below = f"{path}.{name}" if path else name
            if name not in value:
                if key.endswith("?"):
                    continue
                return f"`{below}` is missing"
            if found := find_mismatch(value[name], inner, below):
                return found
        return None
    if isinstance(expected, list):
        if not isinstance(value, list):
            return f"`{path}` is {_shown(value)}, expected a list"
        mismatches = (find_mismatch(item, expected[0], f"{path}[{index}]") for index, item in enumerate(value))
        return next((found for found in mismatches if found), None)
    test, words = expected
    return None if test(value) else f"`{path}` is {_shown(value)}, expected {words}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
