"""Which sources of an analysis another one has, too: by their paths, and moved ones by what is in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

#: What is compared of a source, beside where it is.
_COMPARED = ("content_hash", "schema", "records", "rejected", "num_sequences", "num_tokens")

#: `path` and what is compared.
Source = dict[str, Any]


@dataclass(frozen=True)
class SourceChange:
    """A source that is not the same in both analyses; `before` or `after` is None where it is not there.

    Both have `path`, `content_hash`, `schema`, `records`, `rejected`, `num_sequences` and `num_tokens`. One that is
    "moved" has the same content under another path.
    """

    change: Literal["added", "removed", "changed", "moved"]
    before: Source | None
    after: Source | None


def compare_sources(before: Iterable[Source], after: Iterable[Source]) -> tuple[SourceChange, ...]:
    """The sources of two manifests that are not the same in both, in the order of `before`, then of `after`."""
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


def _same_content(one: Source, other: Source) -> bool:
    return one["content_hash"] is not None and one["content_hash"] == other["content_hash"]


def _by_place(sources: Iterable[Source]) -> dict[tuple[str, int], Source]:
    """By path, and the number among those of that path: a file that is named twice is two sources."""
    seen: Counter[str] = Counter()
    found = {}
    for source in sources:
        path = source["path"]
        found[path, seen[path]] = {"path": path, **{name: source.get(name) for name in _COMPARED}}
        seen[path] += 1
    return found
