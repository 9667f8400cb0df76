"""manifest.json: what it has to hold, checked once when it is read, so that nothing behind has to; written indented."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from chunkplan.config.intake import IntakeOptions
from chunkplan.config.losses import SAMPLES
from chunkplan.config.plan import MAY_LACK, PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.cost.shape import FULL, AttentionPattern
from chunkplan.cost.states import reduction_ns
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
    one_of,
    or_null,
    whole,
)
from chunkplan.errors import DataError, UsageError
from chunkplan.files.folder import MANIFEST
from chunkplan.files.json_file import read_json, refuse_outside
from chunkplan.options import entries_of
from chunkplan.planfile.schema import SAMPLE_COLUMNS, SCHEMA_VERSION, TOKEN_COLUMNS
from chunkplan.quantities import counted

_HINT = "write it again with `chunkplan analyze` or `chunkplan build`"

#: Keys that are listed of a piece, and of a source, and how many of these a line names.
_LISTED, _NAMED = 100, 8

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

    `evidence`: why it is read by its `schema`. `part`: "eval" for sources of evaluation. `reasons`: rejected records by
    reason. `unread_keys`: keys that were not read, each with the number of records, None if not known. `num_truncated`
    sequences were cut, by `num_truncated_tokens` together. `left_out`: number of sequences that the chat template
    leaves something out of, by kind, or with a token of prompt and answer (`shared`), and `first_left_out` the row of
    the first of them.
    """

    path: str
    format: NotRequired[str]
    compression: NotRequired[str | None]
    schema: str | None
    columns: NotRequired[dict[str, str] | None]
    evidence: NotRequired[str | None]
    bytes: NotRequired[int | None]
    part: NotRequired[str]
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
    """Sequences that a plan takes from a source, over all epochs."""

    path: str
    num_sequences: int
    num_held_out: int
    num_occurrences: int


class Selection(TypedDict):
    """Sequences that a plan takes from its analysis, over all epochs."""

    num_sequences: int
    num_held_out: int
    num_occurrences: int
    sources: list[SourceSelection]


ANALYSIS: Expected = {
    "tool_version": TEXT,
    "content_hash": TEXT,
    "content_hashes": {"sequences": TEXT, "tokens?": TEXT, "evaluation?": TEXT},
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
            "part?": one_of("eval"),
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
    "samples?": one_of(*SAMPLES),
    "sample_columns?": [one_of(*SAMPLE_COLUMNS.names, *TOKEN_COLUMNS.names)],
}

_PLAN_CONFIG = {f"{name}?" if name in MAY_LACK else name: entry for name, entry in entries_of(PlanConfig).items()}
_MIX = Domain(
    lambda value: isinstance(value, dict) and all(map(NUMBER.holds, value.values())), "numbers from 0 by source"
)
_SELECTED: dict[str, Domain] = {"num_sequences": whole(), "num_held_out": whole(), "num_occurrences": whole()}
PLAN: Expected = {
    "tool_version": TEXT,
    "content_hash": TEXT,
    "content_hashes": {"config": TEXT, "steps": TEXT, "chunks": TEXT, "schedule": TEXT, "prefixes?": TEXT},
    # The names say how it came about, which other programs may have their own ways for.
    "config": {**_PLAN_CONFIG, "mix": or_null(_MIX), "schedule": TEXT, "packing": TEXT},
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
        "num_run_tokens?": whole(),
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


def config_of(manifest: Mapping[str, Any]) -> PlanConfig:
    """The configuration that the manifest of a plan holds."""
    return PlanConfig.from_entries(manifest["config"])


def reduction_us_of(manifest: Mapping[str, Any]) -> float | None:
    """Time at the end of each step to reduce gradients and gather updated weights, in microseconds.

    `predicted_us` is without it. None where the plan does not describe the model and the GPU it was made for.
    """
    config, cost = config_of(manifest), cost_of(manifest)
    if cost is None:
        return None
    return (
        reduction_ns(
            cost, dp=config.dp, pp=config.pp, layers=config.layers(cost.shape.num_layers), placement=config.placement
        )
        / 1e3
    )


def attention_patterns_of(manifest: Mapping[str, Any]) -> tuple[AttentionPattern, ...]:
    """Attention patterns of the model of a plan; full attention where the plan does not describe it."""
    cost = cost_of(manifest)
    return FULL if cost is None else cost.shape.attention_patterns


def cost_of(manifest: Mapping[str, Any]) -> CostModel | None:
    """The model and the GPU that a plan was made for; None where its manifest does not describe them."""
    try:
        return CostModel.from_dict(manifest["predictions"]["cost_model"], where=MANIFEST)
    except DataError:
        return None


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write `folder/manifest.json`; NaN and infinity are refused because JSON has none."""
    text = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def how_to_build_beside(plan: Path, name: str, *words: str) -> str:
    """The command that builds a plan like `plan`, with the options in `words`, beside it."""
    named = plan.resolve() if plan.name in ("", "..") else plan
    output = named.with_name(f"{named.name}-{name}")
    return shlex.join(["chunkplan", "build", "--like", str(plan), *words, "--output", str(output)])


def read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """Read the manifest of a folder that should be of `kind` ("analysis" or "plan").

    Raises:
        UsageError: there is no such folder, or it has no manifest.
        DataError: it is a link out of the folder, is not JSON (see `json_file.read_json`), is of the other kind, was
            written by another schema version, lacks an entry, or was replaced while it was read.
    """
    path = folder / MANIFEST
    if not path.exists():
        what = f"{folder} has no {MANIFEST}" if folder.is_dir() else f"there is no {kind} at {folder}"
        if (folder / kind / MANIFEST).exists():
            raise UsageError(what, hint=f"give the {kind} in it, {shlex.quote(str(folder / kind))}")
        command = "chunkplan analyze" if kind == "analysis" else "chunkplan build"
        raise UsageError(what, hint=f"`{command}` writes one; give its folder")
    refuse_outside(path, folder)
    try:
        manifest = read_json(path, hint=_HINT)
    except FileNotFoundError as error:
        raise DataError("the folder was replaced while it was read", where=str(path), hint="try again") from error
    if not isinstance(manifest, dict) or manifest.get("kind") not in ("analysis", "plan"):
        raise DataError("not the manifest of an analysis or a plan", where=str(path), hint=_HINT)
    if manifest["kind"] != kind:
        raise DataError(
            f"expected the manifest of one {kind}, found one of kind {manifest['kind']}",
            where=str(path),
            hint=f"give the folder of the {kind}",
        )
    version = manifest.get("schema_version")
    if type(version) is not int or version < 1:
        raise DataError(f"schema_version is {version!r}, expected a whole number from 1", where=str(path), hint=_HINT)
    if version != SCHEMA_VERSION:
        again = "analyze the data again" if kind == "analysis" else "analyze and build again"
        raise DataError(
            f"written by schema version {version} (chunkplan {manifest.get('tool_version')}); "
            f"this chunkplan reads version {SCHEMA_VERSION}",
            where=str(path),
            hint=again if version < SCHEMA_VERSION else f"upgrade chunkplan, or {again} with this version",
        )
    mismatch = find_mismatch(manifest, ANALYSIS if kind == "analysis" else PLAN)
    if mismatch:
        raise DataError(mismatch, where=str(path), hint=_HINT)
    return manifest


def add_unread(unread: dict[str, int | None], more: Mapping[str, int | None]) -> None:
    """Add the counts of `more` to those of `unread`; what is known of one alone is not known of both."""
    for key, count in more.items():
        before = unread.get(key, 0)
        unread[key] = None if count is None or before is None else before + count


def most_unread(unread: Mapping[str, int | None]) -> dict[str, int | None]:
    """The entries of `unread` that are listed: the most frequent, whole columns of tables first."""
    order = sorted(unread.items(), key=lambda one: (one[1] is not None, -(one[1] or 0), one[0]))
    return dict(order[:_LISTED])


def unread_words(sources: Iterable[SourceEntry]) -> str:
    """The keys of sources that nothing was made of, the most frequent first: "`id` in 3 records, `url` in 2"; or ""."""
    unread: dict[str, int | None] = {}
    num_keys, is_least = 0, False
    for source in sources:
        own = source.get("unread_keys", {})
        add_unread(unread, own)
        num_own = source.get("num_unread_keys", len(own))
        num_keys, is_least = max(num_keys, num_own), is_least or num_own > len(own)
    num_keys = max(num_keys, len(unread))
    keys = list(most_unread(unread).items())[:_NAMED]
    named = [f"`{key}`" if count is None else f"`{key}` in {count:,}" for key, count in keys]
    for index, (key, count) in enumerate(keys):
        if count is not None:
            named[index] = f"`{key}` in {counted(count, 'record')}"
            break
    more = f" and {'at least ' if is_least else ''}{num_keys - len(named):,} more" if num_keys > len(named) else ""
    return ", ".join(named) + more
