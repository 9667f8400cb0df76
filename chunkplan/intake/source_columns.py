"""Which key has which role in which source, as the user says it: for all sources, or for those of a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from chunkplan.errors import UsageError

#: Sources that an error names.
_NAMED = 8

_HINT = "before the colon stands the name of a file, the end of its path, or a pattern of either, such as '*.parquet'"


def columns_of_sources(columns: Mapping[str, str], paths: Sequence[str]) -> list[dict[str, str]]:
    """Role -> key for the source at each of `paths`.

    An entry of `columns` is ROLE -> key for all sources, or SOURCE:ROLE -> key for those whose path ends in SOURCE or
    matches it as a pattern, folder by folder from the file upwards. What is said of some sources goes before what is
    said of all.

    Raises:
        UsageError: an entry matches no source, or two say different things of one.
    """
    found = [{role: key for role, key in columns.items() if ":" not in role} for _ in paths]
    said: dict[tuple[int, str], str] = {}
    for entry, key in columns.items():
        pattern, colon, role = entry.rpartition(":")
        if not colon:
            continue
        matched = [index for index, path in enumerate(paths) if _matches(path, pattern)]
        if not matched:
            several = f" and {len(paths) - _NAMED:,} more" if len(paths) > _NAMED else ""
            names = ", ".join(paths[:_NAMED]) + several
            raise UsageError(f"--column {entry}={key}: no source is {pattern}; there are {names}", hint=_HINT)
        for index in matched:
            other = said.setdefault((index, role), entry)
            if columns[other] != key:
                raise UsageError(
                    f"--column {other}={columns[other]} and --column {entry}={key} are both for {paths[index]}",
                    hint="leave one of them out, or name its sources more closely",
                )
            found[index][role] = key
    return found


def _matches(path: str, pattern: str) -> bool:
    """Whether `path` ends in `pattern`, or matches it; a name may have brackets that would be signs of a pattern."""
    return path == pattern or path.endswith(f"/{pattern}") or PurePosixPath(path).match(pattern)
