"""Per-source options by name: the key of each role, the layout of records, the format of a file.

Each option is given for all sources, or for those of a name, which takes precedence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from os.path import commonprefix
from pathlib import PurePosixPath
from typing import NamedTuple

from chunkplan.config.intake import SCHEMAS, IntakeOptions, SourceOverrides
from chunkplan.errors import UsageError
from chunkplan.intake.files import is_url

#: Sources that an error names.
_NAMED = 8


class _Entry(NamedTuple):
    """The `value` of `what` for the sources that `source` names; `place` is the option or the line it is from."""

    source: str
    what: str
    value: str
    place: str


class LayoutOverrides(NamedTuple):
    """The user's layout of a source: the key of each role, the schema, the keys to ignore, whether labels are kept."""

    columns: dict[str, str]
    schema: str | None
    ignored: tuple[str, ...]
    labels: bool = False


NO_OVERRIDES = LayoutOverrides({}, None, ())


def overrides_of_sources(options: IntakeOptions, paths: Sequence[str]) -> list[LayoutOverrides]:
    """The overrides in `options` for the source at each of `paths`.

    Raises UsageError: as `columns_of_sources`, for formats too.
    """
    formats = _of_sources(list(_entries(options.formats)), paths)
    schemas = [one["schema"].value if "schema" in one else options.schema for one in formats]
    ignored = ignored_of_sources(options.ignore_columns, paths)
    labels = [options.undesirable == "keep"] * len(schemas)
    return list(map(LayoutOverrides, columns_of_sources(options.columns, paths), schemas, ignored, labels))


def without_unused(options: IntakeOptions, paths: Sequence[str]) -> tuple[IntakeOptions, list[str]]:
    """`options` without the optional entries that name no source of `paths`, and the places of these entries."""

    def used(said: SourceOverrides, sign: str) -> SourceOverrides:
        sources = {entry: entry.rpartition(sign)[0] if sign else entry for entry in said}
        kept = {
            entry: value
            for entry, value in said.items()
            if entry not in said.optional or not sources[entry] or any(is_named(path, sources[entry]) for path in paths)
        }
        unused.extend(said.place(entry, "") for entry in said if entry not in kept)
        return SourceOverrides(kept, said.places, said.optional)

    unused: list[str] = []
    columns, formats = used(SourceOverrides.of(options.columns), ":"), used(SourceOverrides.of(options.formats), "")
    return (replace(options, columns=columns, formats=formats) if unused else options), unused


def columns_of_sources(columns: Mapping[str, str], paths: Sequence[str]) -> list[SourceOverrides]:
    """Role -> key for the source at each of `paths`.

    An entry of `columns` is ROLE -> key for all sources, or SOURCE:ROLE -> key for those whose path ends in SOURCE or
    matches it as a pattern, folder by folder from the file upwards. Raises UsageError: an entry matches no source, or
    two say different things of one.
    """
    said = SourceOverrides.of(columns)
    all_entries = [
        _Entry(*entry.rpartition(":")[::2], key, said.place(entry, "--column")) for entry, key in said.items()
    ]
    for_all = [entry for entry in all_entries if not entry.source]
    found = _of_sources([entry for entry in all_entries if entry.source], paths)
    merged = [{entry.what: entry for entry in for_all} | entries for entries in found]
    return [
        SourceOverrides(
            {role: entry.value for role, entry in one.items()}, {role: entry.place for role, entry in one.items()}
        )
        for one in merged
    ]


def ignored_of_sources(keys: Sequence[str], paths: Sequence[str]) -> list[tuple[str, ...]]:
    """The keys that are to be ignored in the source at each of `paths`.

    One of `keys` is KEY for all sources, or SOURCE:KEY for those that `is_named` SOURCE. KEY may have colons too: it is
    one where what stands before names no source.
    """
    found: list[list[str]] = [[] for _ in paths]
    for entry in keys:
        ends = [place for place, sign in enumerate(entry) if sign == ":"]
        end = next((end for end in ends if any(is_named(path, entry[:end]) for path in paths)), None)
        for path, own in zip(paths, found, strict=True):
            if end is None or is_named(path, entry[:end]):
                own.append(entry if end is None else entry[end + 1 :])
    return [tuple(own) for own in found]


def suffixes_of(formats: Mapping[str, str]) -> SourceOverrides:
    """SOURCE -> how its name would end if it said what the file is, of those `formats` that say it."""
    found = [entry for entry in _entries(formats) if entry.what == "suffix"]
    return SourceOverrides(
        {entry.source: entry.value for entry in found}, {entry.source: entry.place for entry in found}
    )


def is_named(path: str, source: str) -> bool:
    """True if `path` ends in `source` or matches it as a pattern; names with literal brackets match too.

    A `source` that begins with `./` is a whole path, or a pattern of one.
    """
    if source.startswith("./") and len(PurePosixPath(path).parts) != len(PurePosixPath(source).parts):
        return False
    name = source.removeprefix("./")
    return path in (name, source) or path.endswith(f"/{name}") or PurePosixPath(path).match(source)


def name_of_source(path: str, paths: Sequence[str]) -> str | None:
    """Shortest end of `path` by which --column and --format name this source and no other of `paths`.

    Characters that a flag cannot hold become wildcards. None if no such name is for this source alone.
    """
    whole = [] if path.startswith("/") or is_url(path) else [f"./{path}"]
    names = (name for end in [*_ends(path), *whole] for name in (end, _as_pattern(end)))
    return next((name for name in names if _is_for(name, {path}, paths)), None)


def name_of_sources(some: Collection[str], paths: Sequence[str]) -> str | None:
    """A pattern that names the sources at `some` of `paths` and no other, if there is a plain one."""
    folders = {path.rpartition("/")[0] for path in some}
    names = [path.rpartition("/")[2] for path in some]
    suffixes = {name.partition(".")[2] for name in names}
    beginning = _as_pattern(commonprefix(names))  # noqa: RUF071 (of letters)
    end = _as_pattern(commonprefix([name[::-1] for name in names])[::-1])  # noqa: RUF071
    files = ["*", *(f"*.{_as_pattern(suffix)}" for suffix in suffixes if len(suffixes) == 1)]
    files += [f"{beginning}*{end}", f"{beginning}[0-9]*{end}"]
    above = [f"{_as_pattern(end)}/" for folder in folders for end in _ends(folder) if len(folders) == 1]
    patterns = (f"{folder}{file}" for folder in ["", *above] for file in files)
    return next((pattern for pattern in patterns if _is_for(pattern, {*some}, paths)), None)


def _ends(path: str) -> list[str]:
    """`path` from each of its folders on, the shortest first."""
    parts = path.split("/")
    return [end for number in range(1, len(parts) + 1) if (end := "/".join(parts[-number:]))]


def _as_pattern(name: str) -> str:
    """A pattern that `name` matches, in which nothing is a sign of a pattern, of a flag or of a terminal."""
    signs = {"*": "[*]", "?": "[?]", "[": "[[]", "=": "[<->]"}  # a range with = in it
    return "".join(signs.get(letter, letter if letter.isprintable() else "?") for letter in name)


def _is_for(name: str, some: Collection[str], paths: Sequence[str]) -> bool:
    """True if a flag can hold `name`, and it names the sources at `some` and no other of `paths`."""
    is_plain = "=" not in name and name.isprintable()
    return is_plain and all(is_named(path, name) == (path in some) for path in paths)


def _entries(formats: Mapping[str, str]) -> Iterator[_Entry]:
    """Each of the formats of a source, which have commas between: a schema, or how the name of the file would end."""
    said = SourceOverrides.of(formats)
    for source, names in said.items():
        place = said.place(source, "--format")
        found = {"schema" if name in SCHEMAS else "suffix": name for name in names.split(",")}
        if len(found) != len(names.split(",")):
            raise UsageError(
                f"{place} says twice what it is", hint="give a schema, or what the file is, or one of each"
            )
        yield from (_Entry(source, what, name, place) for what, name in found.items())


def _of_sources(entries: Sequence[_Entry], paths: Sequence[str]) -> list[dict[str, _Entry]]:
    """`what` -> entry, for the source at each of `paths`."""
    found: list[dict[str, _Entry]] = [{} for _ in paths]
    for entry in entries:
        matched = [index for index, path in enumerate(paths) if is_named(path, entry.source)]
        if not matched:
            several = f" and {len(paths) - _NAMED:,} more" if len(paths) > _NAMED else ""
            names = ", ".join(paths[:_NAMED]) + several
            raise UsageError(
                f"{entry.place}: no source is {entry.source}; there are {names}",
                hint="a source is named by its file, by the end of its path, or by a pattern of either, such as "
                "'*.parquet'",
            )
        for index in matched:
            other = found[index].setdefault(entry.what, entry)
            if other.value != entry.value:
                raise UsageError(
                    f"{other.place} and {entry.place} are both for {paths[index]}",
                    hint="leave one of them out, or name its sources more closely",
                )
    return found
