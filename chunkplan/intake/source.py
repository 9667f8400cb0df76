"""Sources of a run: their files, how their records are laid out, the results of their pieces, and their errors."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import shorten

from chunkplan.config.intake import SourceOverrides
from chunkplan.errors import DataError
from chunkplan.intake.pieces import PieceResult
from chunkplan.intake.records import Rejected
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.schemas.fields import TRY, LayoutError, column_flags, hint_of_source
from chunkplan.intake.source_columns import (
    NO_OVERRIDES,
    LayoutOverrides,
    columns_of_sources,
    name_of_source,
    name_of_sources,
)
from chunkplan.intake.sources import LINK, SourceFile
from chunkplan.options import toml_name
from chunkplan.planfile.analysis import record_place
from chunkplan.planfile.manifest import SourceEntry, add_unread, most_unread
from chunkplan.quantities import counted

#: Layouts that were found before data could be pairs and rollouts are found anew.
_READS = 7


@dataclass
class Source:
    """A source and the results of its pieces, which are added while a run goes on.

    `origins` are those of the pieces cut so far; `num_pieces` is None until all are. `reader` is that of its pieces,
    `num_left` the bytes of its file that no piece covers yet. `broken` is the error that ended a stream early, if the
    run goes on without the rest; `ends` a hash of the beginning and end of a file, to compare shards.
    """

    file: SourceFile
    overrides: LayoutOverrides = NO_OVERRIDES
    layout: RecordLayout | None = None
    reader: str | None = None
    results: dict[int, PieceResult] = field(default_factory=dict)
    num_pieces: int | None = None
    broken: Rejected | None = None
    ends: str | None = None
    origins: list[int] = field(default_factory=list)
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_left = sys.maxsize if self.file.num_bytes is None else self.file.num_bytes

    @property
    def request(self) -> str:
        """The requested format and layout as JSON."""
        columns, schema, ignored, labels = self.overrides
        split = [self.file.text_split] if self.file.text_split else []
        asked = [self.file.kind, self.file.compression, schema, sorted(columns.items()), sorted(ignored), *split]
        return json.dumps([*asked, labels, _READS])

    @property
    def is_complete(self) -> bool:
        """True once all its pieces have been processed."""
        return self.num_pieces == len(self.results)

    @property
    def pieces(self) -> list[PieceResult]:
        """The results in the order of the source."""
        return [self.results[index] for index in sorted(self.results)]

    def place(self, piece: int, number: int | None) -> str:
        """Location of a record: file:line, or file and record number; all pieces before it must have ended."""
        if number is None or number < 0:
            return self.name
        return record_place(self.name, self.format, sum(one.num_rows for one in self.pieces[:piece]) + number)

    @property
    def name(self) -> str:
        """The path as it is shown and stored, on one line; names may be any bytes."""
        return os.fsencode(self.file.path).decode("utf-8", "backslashreplace").replace("\n", "\\n")

    @property
    def format(self) -> str:
        """The format that was read: its kind, jsonl where a name says JSON and there are lines, or texts."""
        if self.file.text_split is not None:
            return "texts"
        readers = {self.reader, *(piece.reader for piece in self.results.values())}
        return "jsonl" if "lines" in readers else self.file.kind

    def describe(self, first_sequence_id: int) -> SourceEntry:
        """The entry of the manifest for this source."""
        pieces, rejected = self.pieces, self.rejected
        left_out, first_left_out = self._left_out
        unread: dict[str, int | None] = {}
        for piece in pieces:
            add_unread(unread, piece.unread)

        def total(name: str) -> int:
            return sum(getattr(piece, name) for piece in pieces)

        entry: SourceEntry = {
            "path": self.name,
            "format": self.format,
            "compression": self.file.compression,
            "schema": None if self.layout is None else self.layout.schema,
            "columns": None if self.layout is None else self.layout.columns | self.layout.inside,
            "evidence": self._evidence,
            "bytes": self.file.num_bytes,
            "records": total("num_records") + (self.broken is not None),
            "rejected": rejected.total(),
            "reasons": dict(sorted(rejected.items())),
            "not_sampled": total("num_not_sampled"),
            "content_hash": hashlib.sha256(b"".join(bytes.fromhex(piece.digest) for piece in pieces)).hexdigest(),
            "first_sequence_id": first_sequence_id,
            "num_sequences": total("num_sequences"),
            "more_sequences": total("num_more"),
            "num_tokens": total("num_tokens"),
            "num_truncated": total("num_truncated"),
            "num_truncated_tokens": total("num_truncated_tokens"),
            "unread_keys": most_unread(unread),
            "num_unread_keys": max(len(unread), *(piece.num_unread for piece in pieces), 0),
            "left_out": left_out,
            "first_left_out": first_left_out,
        }
        return {**entry, "part": "eval"} if self.file.is_evaluation else entry

    @property
    def _left_out(self) -> tuple[dict[str, int], dict[str, int]]:
        """The sequences of which the chat template leaves something out, and the row of the first, by what it is."""
        counts: Counter[str] = Counter()
        first: dict[str, int] = {}
        row = 0
        for piece in self.pieces:
            counts.update(piece.left_out)
            for kind, number in piece.first_left_out.items():
                first.setdefault(kind, row + number)
            row += piece.num_rows
        return dict(sorted(counts.items())), dict(sorted(first.items()))

    @property
    def rejected(self) -> Counter[str]:
        """Its records that did not become sequences, by reason."""
        rejected: Counter[str] = Counter()
        for piece in self.pieces:
            rejected.update(piece.rejected)
        rejected.update([self.broken.reason] if self.broken else [])
        return rejected

    @property
    def _evidence(self) -> str | None:
        """The reason why it was read with this layout, or was not read."""
        if self.file.kind == LINK:
            return "a link to a folder, which is not followed"
        if self.layout is not None:
            return self.layout.evidence
        return self.broken.message if self.broken else None

    def check_targets(self, max_length: int | None) -> None:
        """Refuse a source of conversations or prompts of which nothing at all would be trained.

        Raises DataError: no token of its sequences counts in the loss.
        """
        num_sequences = sum(piece.num_sequences for piece in self.pieces)
        if not num_sequences or self.layout is None or self.layout.schema == "length":
            return
        if any(piece.num_target_tokens or piece.is_estimated for piece in self.pieces):
            return
        raise DataError(
            f"no token of its {counted(num_sequences, 'sequence')} counts in the loss (schema {self.layout.schema})",
            where=self.name,
            hint="its texts are of one token each: is it the right key?"
            if self.layout.schema == "text"
            else "check the roles, `loss` and `weight` of its messages, its completions or labels, the chat template"
            + (", and --max-length" if max_length else ""),
        )


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
    num_bytes = sum(source.file.num_bytes or 0 for source, _ in problems)
    size = f" ({counted(num_bytes, 'byte')})" if num_bytes else ""
    narrower = _said_too_widely(problems, paths, columns)
    [(source, error), *others] = problems
    if not others:
        skip = f"--on-error skip leaves this source out{size} and lists it; " if is_rest else ""
        hint = skip + (narrower or hint_for(source, error, paths))
        return UnreadableSourcesError(error.message, where=error.where or source.name, hint=hint)
    lines = [f"{error.where or source.name}: {_in_a_line(source, error, paths)}" for source, error in problems[:_NAMED]]
    if len(problems) > _NAMED:
        lines.append(f"and {len(problems) - _NAMED:,} more")
    if is_rest:
        skip = f"--on-error skip leaves these sources out{size} and lists them"
        hint = "; ".join(filter(None, [skip, narrower or _line_to_paste(problems, paths)]))
    else:
        hint = _line_to_paste(problems, paths) or f"for the first: {hint_for(source, error, paths)}"
    message = f"{len(problems):,} of {counted(len(paths), 'source')} cannot be read, and nothing was tokenised"
    return UnreadableSourcesError(message, hint=hint, lines=lines)


def hint_for(source: Source, error: DataError, paths: Sequence[str]) -> str:
    """The hint of `error`, whose flags are for this source alone where `paths` has others."""
    if {*paths} == {source.file.path}:
        return error.hint
    name = name_of_source(source.file.path, paths)
    if name is None and isinstance(error, LayoutError):
        return "rename this file, which no flag can name without naming another"
    return hint_of_source(error.hint, name)


def _said_too_widely(problems: Sequence[Problem], paths: Sequence[str], columns: Mapping[str, str]) -> str | None:
    """Hint to name single sources for a key that is given for all sources and that the first of `problems` lacks.

    None if the first problem is another one, or no other source has that key.
    """
    error = next((error for _, error in problems if isinstance(error, LayoutError) and error.missing), None)
    if error is None or error.line or not {*error.missing} <= columns.keys():
        return None
    said, keys = SourceOverrides.of(columns), {role: columns[role] for role in error.missing}
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
            hint_of_source(column_flags(keys), name) for name in names
        )
    entries = " and ".join(f"`{role} = {json.dumps(key, ensure_ascii=False)}`" for role, key in keys.items())
    tables = " and ".join(f"`[{toml_name('columns', name)}]`" for name in names)
    return f"in place of {place}{some or ','} write {tables} and below it {entries}"


def _in_a_line(source: Source, error: DataError, paths: Sequence[str]) -> str:
    """Error of one of several sources in one line, with the choices that there are."""
    message = shorten(error.message, _LETTERS, placeholder=" ...")
    is_choice = isinstance(error, LayoutError) and error.is_definite and not error.line
    return f"{message}; {hint_for(source, error, paths)}" if is_choice else message


def _line_to_paste(problems: Sequence[Problem], paths: Sequence[str]) -> str:
    """The line that has those sources read of which the keys are known; "" where there is none.

    Sources of the same keys are named by a pattern where there is one, else each if they are few. Of keys that only
    sources have which the error does not name there is nothing in it.
    """
    groups: dict[str, list[str]] = {}
    for number, (source, error) in enumerate(problems):
        if isinstance(error, LayoutError) and error.line and (error.line in groups or number < _NAMED):
            groups.setdefault(error.line, []).append(source.file.path)
    line = ""
    num_read = num_alike = 0
    for flags, group in groups.items():
        names = _names(group, paths)
        if len(names) > _FEW:
            names = dict([next(iter(names.items()))])
        longer = " ".join([*filter(None, [line]), *(hint_of_source(flags, name) for name in names)])
        if names and (not line or len(longer) <= _LONGEST_LINE):
            line = longer
            num_read += sum(names.values())
            num_alike += len(group) - sum(names.values()) if len(group) > _FEW else 0
    of_them = "" if num_read == len(problems) else f"for {num_read:,} of them "
    alike = f"({num_alike:,} more have the same keys) " if num_alike else ""
    return line and f"{of_them}{alike}{TRY}{line}"


def _names(group: Sequence[str], paths: Sequence[str]) -> dict[str | None, int]:
    """Name -> number of sources, such that a flag covers `group`; None as the one name stands for all sources.

    Sources that no flag can name are left out.
    """
    if {*group} == {*paths}:
        return {None: len(group)}
    pattern = name_of_sources(group, paths) if len({*group}) > 1 else None
    if pattern is not None:
        return {pattern: len(group)}
    named = {path: name_of_source(path, paths) for path in group}
    return {name: group.count(path) for path, name in named.items() if name is not None}
