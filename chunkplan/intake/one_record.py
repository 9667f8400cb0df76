"""One record of a source, by the place that messages name it by: read as it would be among all others."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import UsageError
from chunkplan.files.folder import temporary_folder
from chunkplan.intake.files import STDIN, is_url
from chunkplan.intake.pieces import LengthColumn, Piece
from chunkplan.intake.probe import cut_with_layout
from chunkplan.intake.readers import alone, first_records, num_rows, read
from chunkplan.intake.records import JsonObject, LengthRecord, Record, RecordError
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.source import Source
from chunkplan.intake.source_columns import overrides_of_sources, suffixes_of
from chunkplan.intake.sources import LINK, SourceFile, find_sources
from chunkplan.planfile.analysis import record_place
from chunkplan.quantities import counted

#: Bytes to keep of a line that is no record.
_SHOWN_BYTES = 1 << 16

_LINE = re.compile(r"(?P<path>.+):(?P<number>[0-9]{1,18}):?", re.DOTALL)
_RECORD = re.compile(r"(?P<path>.+), record (?P<number>[0-9]{1,18}):?", re.DOTALL)


@dataclass(frozen=True)
class TypedPlace:
    """A place as it was typed: FILE:LINE, "FILE, record N" or FILE; `kind` is "line", "record" or "file"."""

    path: str
    kind: str
    number: int


@dataclass(frozen=True)
class FoundRecord:
    """One record as the intake reads it.

    `row` is its line or row from 0. `keys` are the stored record, None if it is no object; then `line` is the beginning
    of its line, and `num_line_bytes` the bytes that follow. `read` is its neutral form, or the error.
    """

    place: str
    row: int
    layout: RecordLayout
    keys: JsonObject | None
    line: str | None
    read: Record | RecordError
    num_line_bytes: int = 0


def read_place(typed: str) -> TypedPlace:
    """Parse the place of a record, which may be pasted from a message with the colon behind it."""
    if Path(typed).is_file():
        return TypedPlace(typed, "file", 0)
    if found := _RECORD.fullmatch(typed):
        return TypedPlace(found["path"], "record", int(found["number"]))
    if found := _LINE.fullmatch(typed):
        return TypedPlace(found["path"], "line", int(found["number"]))
    return TypedPlace(typed, "file", 0)


def find_record(
    place: TypedPlace, options: IntakeOptions, *, sources: Sequence[str] = (), named: int | None = None
) -> FoundRecord:
    """Read the record at `place` with `options`, without their sample and error handling.

    `sources` are the paths that the columns of `options` may name, and `named` the index of this one among them, or
    None. Raises UsageError: there is no such file or record, or it is ambiguous; DataError: the file cannot be read, or
    no schema fits its records.
    """
    file = _one_file(place.path, options)
    paths, index = ([*sources, file.path], len(sources)) if named is None else (sources, named)
    source = Source(file, overrides_of_sources(options, paths)[index])
    with temporary_folder(Path(tempfile.gettempdir()), "chunkplan") as spool:
        total = 0
        for piece in cut_with_layout(source, 0, replace(options, on_error="skip"), spool):
            row = _row(place, source)
            rows = num_rows(piece)
            if row < total + rows:
                assert source.layout is not None
                place_of_row = record_place(source.name, source.format, row)
                found = _found(piece, row - total, place_of_row, source.layout, options, spool)
                return replace(found, row=row)
            total += rows
            if piece.is_temporary:
                Path(piece.path).unlink(missing_ok=True)
    first, last = (record_place(source.name, source.format, row) for row in (0, total - 1))
    raise UsageError(
        f"{source.name} has {counted(total, place.kind)}, and no {place.kind} {place.number}",
        hint=f"give one from '{first}' to '{last}'",
    )


def _one_file(path: str, options: IntakeOptions) -> SourceFile:
    if path != STDIN and not is_url(path) and not Path(path).is_file():
        what = f"{path} is a folder" if Path(path).is_dir() else f"there is no file {path}"
        raise UsageError(what, hint="name a file of data and a line of it: FILE:LINE")
    found = find_sources([path], [], suffixes_of(options.formats), text_split=options.text_split)
    files = [file for file in found if file.kind != LINK]
    if len(files) != 1:
        raise UsageError(f"{path} stands for several files", hint="name one of them and a line of it: FILE:LINE")
    return files[0]


def _row(place: TypedPlace, source: Source) -> int:
    """The row that is meant, from 0; raises UsageError where records of this source are not named that way."""
    first = record_place(source.name, source.format, 0)
    match source.format, place.kind:
        case "text", "file":
            return 0
        case "text", _:
            raise UsageError(f"{source.name} is one record, its whole text", hint=f"give '{first}'")
        case "jsonl", "line" if place.number:
            return place.number - 1
        case "npy" | "parquet" | "arrow" | "json" | "csv" | "tsv" | "texts", "record":
            return place.number
    counted_from = "lines are counted from 1" if source.format == "jsonl" else "its records are counted from 0"
    hint = f"{counted_from}: '{first}' is the first"
    if place.kind == "file":
        raise UsageError(f"{source.name} does not say which record", hint=hint)
    raise UsageError(f"{source.name} has no {place.kind} {place.number}", hint=hint)


def _found(
    piece: Piece, number: int, where: str, layout: RecordLayout, options: IntakeOptions, folder: Path
) -> FoundRecord:
    most = options.max_record_bytes
    try:
        piece = alone(piece, number, folder)
    except RecordError as error:
        return FoundRecord(where, number, layout, None, None, error)
    [batch] = read(piece, layout, max_record_bytes=most)
    if not batch.num_records:
        raise UsageError(f"{where} is blank, which is no record", hint="name a line that is not blank")
    keys: JsonObject | None = None
    if piece.reader != "text":
        keys = next(iter(first_records(piece, 1, max_record_bytes=most)), None)
    line, more = None, 0
    if keys is None and piece.reader in ("lines", "elements"):
        with Path(piece.path).open("rb") as file:
            file.seek(piece.start)
            line = file.read(min(piece.num_bytes, _SHOWN_BYTES)).decode("utf-8", "backslashreplace")
        more = max(0, piece.num_bytes - _SHOWN_BYTES)
    read_as: Record | RecordError
    if batch.rejected:
        _, reason, message, hint = batch.rejected[0]
        read_as = RecordError(message, reason=reason, hint=hint)
    elif isinstance(batch.records, LengthColumn):
        read_as = LengthRecord(int(batch.records.num_tokens[0]))
    else:
        read_as = batch.records[0]
    return FoundRecord(where, number, layout, keys, line, read_as, more)
