"""Kinds of samples that no ordinary loss trains: pairs, labelled answers and rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from chunkplan.config.losses import USUAL
from chunkplan.errors import UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.schema import TOKEN_COLUMNS

#: Kind of samples -> the columns that it has in any case, and its name in messages.
_NEEDED = {"preference": {"group", "label"}, "labelled": {"label"}, "rollouts": {"group"}}
IN_WORDS = {"preference": "preference pairs", "labelled": "labelled answers", "rollouts": "rollouts"}


def sample_complaints(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the entries of an analysis's manifest that say of which samples it is."""
    kind, columns = manifest.get("samples"), {*manifest.get("sample_columns", ())}
    if (kind is None) != (not columns):
        yield "it has `samples` without `sample_columns`, or the other way round"
    elif kind is not None and not _NEEDED[kind] <= columns:
        yield f"{IN_WORDS[kind]} lack the columns {', '.join(sorted(_NEEDED[kind] - columns))}"
    elif kind is not None and (more := columns - _NEEDED[kind]) and kind != "rollouts":
        yield f"{IN_WORDS[kind]} have the columns {', '.join(sorted(more))}"
    if not manifest["tokens"] and not columns.isdisjoint(TOKEN_COLUMNS.names):
        yield "it has numbers of tokens, and no tokens"


def refuse_samples(analysis: Analysis, what: str) -> None:
    """Raise UsageError where samples are not ordinary ones, so that `what` would train them as what they are not."""
    if analysis.samples is not None:
        raise UsageError(
            f"{what} takes every answer as one to be learnt, and {analysis.path} is of {IN_WORDS[analysis.samples]}",
            hint=f"`chunkplan build {analysis.path} --loss {USUAL[analysis.samples]}` and `chunkplan train` learn "
            "from these",
        )
