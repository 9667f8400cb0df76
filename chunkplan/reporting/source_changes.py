"""Which sources of an analysis another one has, too: by their paths, and moved ones by what is in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypedDict

from chunkplan.planfile.manifest_entries import SourceEntry


class ComparedSource(TypedDict):
    """What is compared of a source; None where its manifest does not say it."""

    path: str
    content_hash: str | None
    schema: str | None
    records: int
    rejected: int | None
    num_sequences: int | None
    num_tokens: int | None


@dataclass(frozen=True)
class SourceChange:
    """A source that is not the same in both analyses; `before` or `after` is None where it is not there.

    One that is "moved" has the same content under another path.
    """

    change: Literal["added", "removed", "changed", "moved"]
    before: ComparedSource | None
    after: ComparedSource | None


def compare_sources(before: Iterable[SourceEntry], after: Iterable[SourceEntry]) -> tuple[SourceChange, ...]:
    """Find the sources of two manifests that are not the same in both, in the order of `before`, then of `after`."""
    old, new = _by_place(before), _by_place(after)
    added = {place: source for place, source in new.items() if place not in old}
    found = []
    for place, source in old.items():
        if place in new:
            if source != new[place]:
                found.append(SourceChange("changed", source, new[place]))
            continue
        moved_to = next((other for other in added if _same_content(added[other], source)), None)
        if moved_to is None:
            found.append(SourceChange("removed", source, None))
        else:
            found.append(SourceChange("moved", source, added.pop(moved_to)))
    return (*found, *(SourceChange("added", None, source) for source in added.values()))


def _same_content(one: ComparedSource, other: ComparedSource) -> bool:
    return one["content_hash"] is not None and one["content_hash"] == other["content_hash"]


def _by_place(sources: Iterable[SourceEntry]) -> dict[tuple[str, int], ComparedSource]:
    """Key sources by path and their number among those of that path: a file that is named twice is two sources."""
    seen: Counter[str] = Counter()
    found: dict[tuple[str, int], ComparedSource] = {}
    for source in sources:
        path = source["path"]
        found[path, seen[path]] = {
            "path": path,
            "content_hash": source.get("content_hash"),
            "schema": source["schema"],
            "records": source["records"],
            "rejected": source.get("rejected"),
            "num_sequences": source.get("num_sequences"),
            "num_tokens": source.get("num_tokens"),
        }
        seen[path] += 1
    return found
