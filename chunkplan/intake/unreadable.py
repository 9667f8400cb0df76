"""The error of sources that cannot be read, all of them at once, with what to type to have them read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from textwrap import shorten

from chunkplan.config.intake import Said
from chunkplan.errors import DataError
from chunkplan.intake.schemas.fields import TRY, Flag, LayoutError, column_flags, hint_of_source, line_of
from chunkplan.intake.source import Source
from chunkplan.intake.source_columns import columns_of_sources, name_of_source, name_of_sources
from chunkplan.options import toml_name
from chunkplan.quantities import counted

#: Sources that an error names, and letters of what it says of each: a screenful in all.
_NAMED, _LETTERS = 12, 120

#: Letters of a line to be pasted, unless the flags of the first source alone have more.
_LONGEST_LINE = 1000

#: Sources of the same keys that a line names each.
_FEW = 4

#: A source that cannot be read, and why.
Problem = tuple[Source, DataError]


class UnreadableSourcesError(DataError):
    """Sources that cannot be read at all; the hint says of --on-error skip where there are others, which could be."""


def unreadable_sources(
    problems: Sequence[Problem], paths: Sequence[str], columns: Mapping[str, str]
) -> UnreadableSourcesError:
    """The error of sources that cannot be read, `paths` being those of all there are; `problems` has them in order.

    `columns` is what the user says of keys (see `columns_of_sources`). One source is reported as it is, several in a
    line each. The hint ends with the line to type where one would do.
    """
    is_rest = len(problems) < len(paths)
    [(source, error), *others] = problems
    if not others:
        skip = f"--on-error skip leaves this source out{_size([source])} and lists it; " if is_rest else ""
        hint = skip + (_said_too_widely(problems, paths, columns) or hint_for(source, error, paths))
        return UnreadableSourcesError(error.message, where=error.where or source.name, hint=hint)
    lines = [f"{error.where or source.name}: {_in_a_line(source, error, paths)}" for source, error in problems[:_NAMED]]
    if len(problems) > _NAMED:
        lines.append(f"and {len(problems) - _NAMED:,} more")
    size = _size([source for source, _ in problems])
    hints = [f"--on-error skip leaves these sources out{size} and lists them"] if is_rest else []
    if is_rest and (narrower := _said_too_widely(problems, paths, columns)):
        hints.append(narrower)
    else:
        hints += _lines_to_paste(problems, paths) or (
            [] if is_rest else [f"for the first: {hint_for(source, error, paths)}"]
        )
    message = f"{len(problems):,} of {counted(len(paths), 'source')} cannot be read, and nothing was tokenised"
    return UnreadableSourcesError(message, hint="; ".join(hints), lines=lines)


def _size(sources: Sequence[Source]) -> str:
    """How much is in these sources, as far as that is known."""
    num_bytes = sum(source.file.num_bytes or 0 for source in sources)
    return f" ({counted(num_bytes, 'byte')})" if num_bytes else ""


def hint_for(source: Source, error: DataError, paths: Sequence[str]) -> str:
    """The hint of `error`, whose flags are for this source alone where `paths` has others."""
    if {*paths} == {source.file.path}:
        return error.hint
    name = name_of_source(source.file.path, paths)
    if not isinstance(error, LayoutError):
        return hint_of_source(error.hint, name)
    if name is None:
        return "rename this file, which no flag can name without naming another"
    return error.hint_for(name)


def _said_too_widely(problems: Sequence[Problem], paths: Sequence[str], columns: Mapping[str, str]) -> str | None:
    """What to say of single sources in place of a key that is said of all, and that the first of `problems` lacks.

    None where it is wrong for another reason, or no other source has that key.
    """
    error = next((error for _, error in problems if isinstance(error, LayoutError) and error.missing), None)
    if error is None or error.line or not {*error.missing} <= columns.keys():
        return None
    said, keys = Said.of(columns), {role: columns[role] for role in error.missing}
    bad = {source.file.path for source, _ in problems}
    found = zip(paths, columns_of_sources(columns, paths), strict=True)
    others = [path for path, own in found if path not in bad and keys.items() <= own.items()]
    all_names = [name for name in _names(others, paths) if name is not None]
    if not all_names:
        return None
    names = all_names[:_FEW]
    some = f", for {len(names)} of {len(all_names):,} sources," if len(names) < len(all_names) else ""
    place = said.places.get(error.missing[0])
    if place is None:
        return f"in place of what is said of all,{some.removeprefix(',')} {TRY}" + " ".join(
            line_of(column_flags(keys), name) for name in names
        )
    entries = " and ".join(f"`{role} = {json.dumps(key, ensure_ascii=False)}`" for role, key in keys.items())
    tables = " and ".join(f"`[{toml_name('columns', name)}]`" for name in names)
    return f"in place of {place}{some or ','} write {tables} and below it {entries}"


def _in_a_line(source: Source, error: DataError, paths: Sequence[str]) -> str:
    """What is wrong with a source of several, and what there is to choose from."""
    message = shorten(error.message, _LETTERS, placeholder=" ...")
    is_choice = isinstance(error, LayoutError) and error.is_definite and not error.line
    return f"{message}; {hint_for(source, error, paths)}" if is_choice else message


def _lines_to_paste(problems: Sequence[Problem], paths: Sequence[str]) -> list[str]:
    """The line that has those sources read of which the keys are known, as a part of a hint; nothing for none.

    Sources of the same keys are named by a pattern where there is one, else each if they are few. Of keys that only
    sources have which the error does not name there is nothing in it.
    """
    groups: dict[tuple[Flag, ...], list[str]] = {}
    for number, (source, error) in enumerate(problems):
        if isinstance(error, LayoutError) and error.line and (error.line in groups or number < _NAMED):
            groups.setdefault(error.line, []).append(source.file.path)
    flags: list[str] = []
    num_read = num_alike = 0
    for line, group in groups.items():
        names = _names(group, paths)
        if len(names) > _FEW:
            names = dict([next(iter(names.items()))])
        typed = " ".join(line_of(line, name) for name in names)
        if names and (not flags or len(" ".join([*flags, typed])) <= _LONGEST_LINE):
            flags.append(typed)
            num_read += sum(names.values())
            num_alike += len(group) - sum(names.values()) if len(group) > _FEW else 0
    if not flags:
        return []
    of_them = "" if num_read == len(problems) else f"for {num_read:,} of them "
    alike = f"({num_alike:,} more have the same keys) " if num_alike else ""
    return [of_them + alike + TRY + " ".join(flags)]


def _names(group: Sequence[str], paths: Sequence[str]) -> dict[str | None, int]:
    """What names the sources of a group in a flag, each with their number: None alone for all that there are.

    Sources that no flag can name are left out.
    """
    if {*group} == {*paths}:
        return {None: len(group)}
    pattern = name_of_sources(group, paths) if len({*group}) > 1 else None
    if pattern is not None:
        return {pattern: len(group)}
    named = {path: name_of_source(path, paths) for path in group}
    return {name: group.count(path) for path, name in named.items() if name is not None}
