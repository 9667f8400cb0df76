"""What the user says of sources by their names: which key has which role, how records are laid out, what a file is.

Each is said for all sources, or for those of a name, which goes before what is said for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from chunkplan.config.intake import SCHEMAS
from chunkplan.errors import UsageError

#: Sources that an error names.
_NAMED = 8


class _Said(NamedTuple):
    """What is said of the sources that `source` names: the `value` of `what`, as the option `flag` is typed."""

    source: str
    what: str
    value: str
    flag: str


def columns_of_sources(columns: Mapping[str, str], paths: Sequence[str]) -> list[dict[str, str]]:
    """Role -> key for the source at each of `paths`.

    An entry of `columns` is ROLE -> key for all sources, or SOURCE:ROLE -> key for those whose path ends in SOURCE or
    matches it as a pattern, folder by folder from the file upwards.

    Raises:
        UsageError: an entry matches no source, or two say different things of one.
    """
    for_all = {role: key for role, key in columns.items() if ":" not in role}
    split = ((*entry.rpartition(":"), key) for entry, key in columns.items() if ":" in entry)
    said = [_Said(source, role, key, f"--column {source}:{role}={key}") for source, _, role, key in split]
    return [for_all | found for found in _of_sources(said, paths, "before the colon")]


def schemas_of_sources(schema: str | None, formats: Mapping[str, str], paths: Sequence[str]) -> list[str | None]:
    """The schema of the source at each of `paths`, where the user says it: that of `formats`, else `schema`.

    Raises:
        UsageError: as `columns_of_sources`; the same is asked of what `formats` say of files.
    """
    found = _of_sources(list(_said(formats)), paths, "before the sign =")
    return [one.get("schema", schema) for one in found]


def suffixes_of(formats: Mapping[str, str]) -> dict[str, str]:
    """SOURCE -> how its name would end if it said what the file is, of those `formats` that say it."""
    return {said.source: said.value for said in _said(formats) if said.what == "suffix"}


def is_named(path: str, source: str) -> bool:
    """Whether `path` ends in `source`, or matches it; a name may have brackets that would be signs of a pattern."""
    return path == source or path.endswith(f"/{source}") or PurePosixPath(path).match(source)


def _said(formats: Mapping[str, str]) -> Iterator[_Said]:
    """Each of the formats of a source, which have commas between: a schema, or how the name of the file would end."""
    for source, names in formats.items():
        flag = f"--format {source}={names}"
        found = {"schema" if name in SCHEMAS else "suffix": name for name in names.split(",")}
        if len(found) != len(names.split(",")):
            raise UsageError(f"{flag} says twice what it is", hint="give a schema, or what the file is, or one of each")
        yield from (_Said(source, what, name, flag) for what, name in found.items())


def _of_sources(entries: Sequence[_Said], paths: Sequence[str], where: str) -> list[dict[str, str]]:
    """What -> value for the source at each of `paths`; `where` in a flag the source stands, for a hint."""
    found: list[dict[str, str]] = [{} for _ in paths]
    saying: dict[tuple[int, str], _Said] = {}
    for said in entries:
        matched = [index for index, path in enumerate(paths) if is_named(path, said.source)]
        if not matched:
            several = f" and {len(paths) - _NAMED:,} more" if len(paths) > _NAMED else ""
            names = ", ".join(paths[:_NAMED]) + several
            raise UsageError(
                f"{said.flag}: no source is {said.source}; there are {names}",
                hint=f"{where} stands the name of a file, the end of its path, or a pattern of either, such as "
                "'*.parquet'",
            )
        for index in matched:
            other = saying.setdefault((index, said.what), said)
            if other.value != said.value:
                raise UsageError(
                    f"{other.flag} and {said.flag} are both for {paths[index]}",
                    hint="leave one of them out, or name its sources more closely",
                )
            found[index][said.what] = said.value
    return found
