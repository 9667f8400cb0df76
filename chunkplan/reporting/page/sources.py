"""The data sources on a page: what each has, and what of it is split, left out, rejected or cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from chunkplan.quantities import percent
from chunkplan.reporting.by_source import SourceRow
from chunkplan.reporting.page.parts import Section, Table

#: Sources that are listed: those with the most tokens.
_MOST_SOURCES = 100

#: Columns that are there where a source has any of it: their names, values, and what they mean.
_LOSSES: tuple[tuple[str, Callable[[SourceRow], int | None], str], ...] = (
    (
        "left out",
        lambda row: row.num_absent_tokens,
        "Left out are tokens of sequences that the plan does not hold: they are held out, dropped or not taken.",
    ),
    (
        "records rejected",
        lambda row: row.num_rejected,
        "Rejected records became no sequence; `rejected.jsonl` of the analysis says why.",
    ),
    ("tokens cut", lambda row: row.num_cut_tokens, "Cut are the tokens of sequences beyond the maximum length."),
)


def sources_section(sources: Sequence[SourceRow]) -> list[Section]:
    """Show the sources of an analysis, or what a plan holds of them; nothing where there are none."""
    if not sources:
        return []
    is_plan = sources[0].num_split_tokens is not None
    notes = ["What the plan holds of each source of the data." if is_plan else "What each source of the data has."]
    losses = [loss for loss in _LOSSES if any(loss[1](row) for row in sources)]
    notes += [" ".join(words for _, _, words in losses) or "Nothing of them is lost."]
    shown = sources
    if len(sources) > _MOST_SOURCES:
        largest = sorted(range(len(sources)), key=lambda place: -sources[place].num_tokens)[:_MOST_SOURCES]
        shown = [sources[place] for place in sorted(largest)]
        notes.append(f"The {_MOST_SOURCES} with the most tokens, of {len(sources):,}.")
    folder = _common_folder([row.path for row in shown])
    notes += [f"The folder of all of them: {folder}"] if folder else []
    total = max(sum(row.num_tokens for row in sources), 1)
    head = ["source", "sequences", "tokens", "of all tokens", "trained tokens", "longest"]
    head += ["in split sequences"] if is_plan else []
    rows = [
        (
            row.path.removeprefix(folder),
            f"{row.num_sequences:,}",
            f"{row.num_tokens:,}",
            percent(row.num_tokens / total),
            f"{row.num_target_tokens:,}",
            f"{row.longest:,}",
            *([percent((row.num_split_tokens or 0) / max(row.num_tokens, 1))] if is_plan else []),
            *(_number(value(row)) for _, value, _ in losses),
        )
        for row in shown
    ]
    table = Table("Sources of the data", [*head, *(name for name, _, _ in losses)], rows)
    return [Section("sources", "Data sources", notes, tables=[table])]


def _common_folder(paths: Sequence[str]) -> str:
    """The folders that all paths begin with, up to and with a slash; "" for a single path or where there are none."""
    folders = zip(*(path.split("/")[:-1] for path in paths), strict=False) if len(paths) > 1 else ()
    return "".join(f"{each[0]}/" for each in takewhile(lambda each: len(set(each)) == 1, folders))


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"
