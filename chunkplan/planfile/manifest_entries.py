"""What a manifest has to hold: every entry that a reader relies on, with what it may be.

A manifest may come from anywhere. It is checked here once, when it is read, so that nothing behind has to.
"""

from __future__ import annotations

import re
from typing import NotRequired, TypedDict

from chunkplan.config.intake import IntakeOptions
from chunkplan.config.plan import PlanConfig
from chunkplan.domains import (
    COUNTS,
    COUNTS_OR_NULL,
    FLAG,
    LINE,
    NUMBER,
    PATH,
    SHARE,
    TEXT,
    WORDS,
    Domain,
    Expected,
    find_mismatch,
    or_null,
    whole,
)
from chunkplan.options import entries_of

_TOKEN_FILE = re.compile(r"tokens/part-\d{5,9}\.arrow")

TOKEN_FILE = Domain(
    lambda value: isinstance(value, str) and _TOKEN_FILE.fullmatch(value) is not None,
    "the name of a token file in tokens/",
)

_TOKENIZER: Expected = {
    "path": PATH,
    "content_hash": TEXT,
    "vocab_size?": or_null(whole()),
    "eos_token?": or_null(TEXT),
}
TOKENIZER = Domain(
    lambda value: isinstance(value, dict) and find_mismatch(value, _TOKENIZER) is None,
    "an object with `path` and `content_hash`, strings, and maybe `vocab_size` and `eos_token`",
)


class TokenFileEntry(TypedDict):
    """A token file of an analysis: its name, its first sequence, and how many sequences each record batch has."""

    file: str
    first_sequence_id: int
    rows: list[int]


class SourceEntry(TypedDict):
    """A source of an analysis (docs/plan-format.md). `analyze` writes all entries.

    `evidence`: why it is read by its `schema`. `reasons`: rejected records by reason. `unread_keys`: keys of records
    that nothing was made of, each with the number of records, or None where that is not known. `num_truncated`
    sequences were cut, by `num_truncated_tokens` together. `left_out`: sequences of which the chat template leaves
    something out, by what it is, or with a token of prompt and answer (`shared`), and `first_left_out` the row of the
    first of them.
    """

    path: str
    format: NotRequired[str]
    compression: NotRequired[str | None]
    schema: str | None
    columns: NotRequired[dict[str, str] | None]
    evidence: NotRequired[str | None]
    bytes: NotRequired[int | None]
    content_hash: NotRequired[str]
    records: int
    rejected: NotRequired[int]
    reasons: NotRequired[dict[str, int]]
    not_sampled: NotRequired[int]
    first_sequence_id: NotRequired[int]
    num_sequences: NotRequired[int]
    more_sequences: NotRequired[int]
    num_tokens: NotRequired[int]
    num_truncated: NotRequired[int]
    num_truncated_tokens: NotRequired[int]
    unread_keys: NotRequired[dict[str, int | None]]
    num_unread_keys: NotRequired[int]
    left_out: NotRequired[dict[str, int]]
    first_left_out: NotRequired[dict[str, int]]


class SourceSelection(TypedDict):
    """What a plan takes of a source, over all epochs."""

    path: str
    num_sequences: int
    num_held_out: int
    num_occurrences: int


class Selection(TypedDict):
    """What a plan takes of its analysis, over all epochs."""

    num_sequences: int
    num_held_out: int
    num_occurrences: int
    sources: list[SourceSelection]


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
            "more_sequences?": whole(),
            "num_tokens?": whole(),
            "num_truncated?": whole(),
            "num_truncated_tokens?": whole(),
            "unread_keys?": COUNTS_OR_NULL,
            "num_unread_keys?": whole(),
            "left_out?": COUNTS,
            "first_left_out?": COUNTS,
        }
    ],
    "exact": FLAG,
    "sample": or_null(SHARE),
    "rejected": COUNTS,
    "truncated": {"num_sequences": whole(), "num_tokens": whole()},
    "max_token_id": or_null(whole()),
    "tokenizer?": or_null(TOKENIZER),
    "template_hash?": or_null(TEXT),
    "options?": {f"{name}?": expected for name, expected in entries_of(IntakeOptions).items()},
    "tokens": [{"file": TOKEN_FILE, "first_sequence_id": whole(), "rows": [whole(1)]}],
}

#: Missing where they are at their defaults.
_NEW = ("cp", "stage_layers", "keep_attention")
_PLAN_CONFIG = {f"{name}?" if name in _NEW else name: entry for name, entry in entries_of(PlanConfig).items()}
_SELECTED: dict[str, Domain] = {"num_sequences": whole(), "num_held_out": whole(), "num_occurrences": whole()}
PLAN: Expected = {
    "tool_version": TEXT,
    "content_hash": TEXT,
    "content_hashes": {"config": TEXT, "steps": TEXT, "chunks": TEXT, "schedule": TEXT},
    # The names say how it came about, which other programs may have their own ways for.
    "config": {**_PLAN_CONFIG, "schedule": TEXT, "packing": TEXT},
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
            "shape": {"name": TEXT, "num_layers": whole(1), "max_positions": or_null(whole(1))},
            "hardware": {"name": TEXT},
            "tp": whole(1),
            "checkpointing": TEXT,
            "kv_offload": FLAG,
            "lora_rank?": whole(),
            "load_in_4bit?": FLAG,
            "optimizer?": TEXT,
            "fused_kernels?": TEXT,
            "compile?": FLAG,
        },
        "predicted_us": NUMBER,
        "lower_bound_us": NUMBER,
    },
}
