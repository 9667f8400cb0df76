"""Looks at the first records of every source before any is read, so that all that cannot be read is found at once.

Only the bytes that it takes to find the layout of a file's records are read. Sources that can be read only once are not
touched, and neither are URLs that have to be fetched whole.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import DataError
from chunkplan.intake import pieces
from chunkplan.intake.files import is_url, name_of
from chunkplan.intake.pieces import Piece
from chunkplan.intake.readers import cut, default_columns, first_records, is_stream, read
from chunkplan.intake.readers.streams import ByteCounter, chunks, contents
from chunkplan.intake.records import JsonObject, RecordError, Rejected
from chunkplan.intake.schemas import RecordLayout, detect, parse
from chunkplan.intake.schemas.detection import columns_inside, is_null, refuse_missing
from chunkplan.intake.schemas.fields import TRY, LayoutError
from chunkplan.intake.schemas.rollouts import ROLLOUT_ROLES, numbers_of
from chunkplan.intake.schemas.tokens import OF_TOKENS, marks_of
from chunkplan.intake.signatures import kind_of
from chunkplan.intake.source import Source
from chunkplan.intake.sources import COMPRESSIONS, LINK, SourceFile

#: Records that say how those of a source are laid out, and how many are looked at where these are null.
_RECORDS, _MOST_RECORDS = 100, 10_000

#: Kinds of files of which nothing is known before they are fetched whole.
_FETCHED = ("arrow", "npy")

#: Readers of pieces of lines; tables look further on their own.
_OF_LINES = ("lines", "elements")

#: How a source is laid out in which there is no record.
_NO_RECORD = RecordLayout("text", {"text": "text"}, "no record")

#: Reasons for which the first records may be left out of a source that can be read.
_OF_RECORDS = ("empty", "untrained", "undesirable")


def probe(source: Source, index: int, options: IntakeOptions, spool: Path) -> RecordLayout | None:
    """Find the layout of a source, where its file shows it before it is read.

    Raises DataError: the source cannot be read; where errors stop the run, also that none of its first records can be;
    UsageError: as `find_layout`, or the file cannot be opened.
    """
    file = source.file
    if file.damage is not None:
        raise RecordError(file.damage, reason="unreadable", where=source.name, hint="fix it, or take it away")
    is_once = file.num_bytes is None and not is_url(file.path)
    if file.kind == LINK or is_once or (is_url(file.path) and file.kind in _FETCHED):
        return None
    if file.kind == "text" and file.text_split is None:
        if file.num_bytes != 0 or file.compression:  # an empty text is a blank record
            next(chunks(file.path, file.compression, is_look=True))
        return None
    piece = _beginning(file, index, options, spool) if is_stream(file) else None
    if piece is None and is_stream(file):
        return None
    try:
        found, records = look_ahead(iter([piece]) if piece else cut(file, index, spool), source, options)
        if piece and len(records) >= _RECORDS and _are_null(records, source):
            return None  # what comes behind the beginning says more
        layout = find_layout(source, records)
        if options.on_error == "stop":
            _check_records(source, next(found), layout, records, options)
    finally:
        if piece:
            Path(piece.path).unlink(missing_ok=True)
    return None if is_stream(file) else layout


def look_ahead(
    found: Iterator[Piece], source: Source, options: IntakeOptions
) -> tuple[Iterator[Piece], list[JsonObject]]:
    """Return all pieces of `found`, and the first records of `source` that can be read.

    Pieces of lines are taken up to the one with the first record that is not null, or, where errors stop the run, the
    first bad one. An error that ends `found` meanwhile comes behind the pieces before it; before any piece it is
    raised.
    """
    held: list[Piece] = []
    records: list[JsonObject] = []
    try:
        for piece in found:
            for count in (_RECORDS, _MOST_RECORDS):
                found_here = first_records(piece, count, max_record_bytes=options.max_record_bytes)
                are_null = bool(found_here) and _are_null(found_here, source)
                if not are_null or len(found_here) < count:
                    break
            held.append(piece)
            records = found_here or records
            if (found_here and not are_null) or piece.reader not in _OF_LINES:
                break
            if not are_null and options.on_error == "stop" and _first_bad(piece, _NO_RECORD, options):
                break
    except RecordError as error:
        if not held:
            raise
        return chain(held, _raising(error)), records
    return chain(held, found), records


def cut_with_layout(source: Source, index: int, options: IntakeOptions, spool: Path) -> Iterator[Piece]:
    """The pieces of a source, which are noted there; its layout is found with the first, where it is not known."""
    found, records = cut(source.file, index, spool), list[JsonObject]()
    if source.layout is None:
        found, records = look_ahead(found, source, options)
    for piece in found:
        if source.layout is None:
            source.layout = find_layout(source, records)
        source.reader = piece.reader
        source.origins.append(piece.origin)
        yield piece


def _are_null(records: Sequence[JsonObject], source: Source) -> bool:
    """Return whether these records say nothing of how those of `source` are laid out, as they are null."""
    return all(
        is_null(record, source.overrides.schema, columns_inside(source.overrides.columns)[0]) for record in records
    )


def _first_bad(piece: Piece, layout: RecordLayout, options: IntakeOptions) -> Rejected | None:
    """The first record of a piece that ends a run which errors stop."""
    batches = read(piece, layout, max_record_bytes=options.max_record_bytes, sample=options.sample)
    rejected = (rejected for batch in batches for rejected in batch.rejected)
    return next((rejected for rejected in rejected if rejected.reason not in _OF_RECORDS), None)


def _raising(error: RecordError) -> Iterator[Piece]:
    yield from ()
    raise error


def find_layout(source: Source, records: Sequence[JsonObject]) -> RecordLayout:
    """Return the layout of a source that begins with `records`.

    Raises LayoutError: no schema is known that fits, or several do; DataError: the source is unreadable; UsageError:
    there is no such schema or role.
    """
    if not records:  # nothing to be found out, and nothing that a schema could be wrong for
        return _NO_RECORD
    columns, schema, ignored, labels = source.overrides
    said, inside = columns_inside(columns)
    try:
        before = _NO_RECORD if not ignored else replace(_NO_RECORD, ignored=ignored)
        refuse_missing(inside, columns, map(before.as_read, records))
        records = list(map(replace(before, inside=inside).as_read, records))
        found = detect(records, schema=schema, columns=said or default_columns(source.file))
        is_tokens = found.schema in OF_TOKENS
        marks = dict.fromkeys(key for record in records for key in marks_of(record, found.columns) if is_tokens)
        numbers = next(filter(None, (numbers_of(record, found.columns) for record in records if is_tokens)), ())
        if labels and "label" not in found.columns and found.schema != "preference":
            hint = "give data with `label` beside each answer, or leave --kto-negatives out"
            raise LayoutError(
                f"--kto-negatives keep, and no answer is labelled in data of schema {found.schema}", hint=hint
            )
        if not numbers and (alone := next((role for role in said if role in ROLLOUT_ROLES), None)):
            hint = "name a reward or advantages too: --column reward=KEY"
            raise LayoutError(
                f"--column {alone}={said[alone]}, and nothing says that the tokens were sampled", hint=hint
            )
        found = replace(found, ignored=ignored, marks=tuple(marks) if is_tokens else None, inside=inside)
        return replace(found, labels=labels and "label" in found.columns, numbers=numbers)
    except LayoutError as error:
        raise LayoutError(error.message, hint=error.hint, where=source.name, missing=error.missing) from error
    except DataError as error:
        raise DataError(error.message, where=source.name, hint=error.hint) from error


def _beginning(file: SourceFile, index: int, options: IntakeOptions, spool: Path) -> Piece | None:
    """The first lines of a file that has to be read in order, as a temporary piece; None if the first is very long."""
    data, reader = contents(file, ByteCounter(), is_look=True)
    head = bytearray()
    is_whole = True
    try:
        for block in data:
            head += block
            if head.count(b"\n") > _RECORDS or len(head) > pieces.PIECE_BYTES:
                is_whole = False
                break
    except RecordError:
        if options.on_error == "stop" or not head:
            raise
        is_whole = False  # what comes before the damage is read
    size = len(head) if is_whole else head.rfind(b"\n") + 1
    if not size:
        return None
    spool.mkdir(parents=True, exist_ok=True)
    path = spool / f"source-{index:05}-beginning.jsonl"
    path.write_bytes(head[:size])
    return Piece(index, 0, str(path), reader, 0, size, origin=0, is_temporary=True, num_bytes=size)


def _check_records(
    source: Source, piece: Piece, layout: RecordLayout, records: Sequence[JsonObject], options: IntakeOptions
) -> None:
    """Refuse a source of whose first records none can be read, or that begins with a part of one."""
    head = b""
    if piece.reader == "lines":
        with Path(piece.path).open("rb") as file:
            file.seek(piece.start)
            head = file.read(pieces.LOOK_BYTES)
    goes_on = head.split(b"\n")[0].strip() in (b"{", b"[")  # nothing but the beginning of a JSON value
    if not goes_on and any(_is_readable(layout, record) for record in records):
        return
    rejected = _first_bad(piece, layout, options)
    if rejected is not None:
        source.reader = piece.reader
        where = source.place(0, rejected.number)
        hint = rejected.hint
        if rejected.reason == "not-json" and rejected.number == 0 and goes_on and kind_of(head, "") == "json":
            suffix = {None: ""} | {how: suffix for suffix, how in COMPRESSIONS.items()}
            name = f"{name_of(source.file.path)}=json{suffix[source.file.compression]}"
            hint = f"a value goes on over several lines, as in .json: {TRY}--format {shlex.quote(name)}"
        raise RecordError(rejected.message, reason=rejected.reason, hint=hint, where=where)


def _is_readable(layout: RecordLayout, record: JsonObject) -> bool:
    try:
        parse(layout, record)
    except RecordError as error:
        return error.reason in _OF_RECORDS
    return True
