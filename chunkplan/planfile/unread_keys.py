"""Keys of records that nothing was made of: counted over pieces and sources, and said in a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from chunkplan.planfile.manifest_entries import SourceEntry
from chunkplan.quantities import counted

#: Keys that are listed of a piece, and of a source, and how many of these a line names.
_LISTED, _NAMED = 100, 8


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
