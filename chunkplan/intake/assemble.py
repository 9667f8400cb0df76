"""Pieces -> an analysis: in the order of the sources, whoever processed them and in whichever order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from chunkplan.arrays import Int64Array
from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import DataError, UsageError
from chunkplan.intake.pieces import PieceResult
from chunkplan.intake.records import HINTS_OF_ALL
from chunkplan.intake.source import Source
from chunkplan.intake.store import DIGESTS, TOKENS, check_room, read_lengths, read_rejected
from chunkplan.intake.tokenizer import TokenizerEntry
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.manifest import SourceEntry
from chunkplan.planfile.samples import IN_WORDS
from chunkplan.planfile.schema import TOKEN_COLUMNS

REJECTED = "rejected.jsonl"


def assemble(
    folder: Path,
    sources: Sequence[Source],
    locate: Callable[[str], Path],
    options: IntakeOptions,
    tokenizer: TokenizerEntry | None,
) -> None:
    """Write the analysis of `sources`, all of whose pieces are in the folders that `locate` names, into `folder`.

    Tokens are stored if every sequence has them. `tokenizer` is the manifest's entry, with its `template_hash`. Raises
    DataError: there is no sequence, or a source has no target; UsageError: there is no room for the analysis, or a
    piece is gone.
    """
    pieces = [piece for source in sources for piece in source.pieces]
    rejected: Counter[str] = Counter()
    for source in sources:
        rejected.update(source.rejected)
    if not any(piece.num_sequences for piece in pieces):
        raise _nothing(sources, rejected, locate)
    for source in sources:
        source.check_targets(options.max_length)
    has_tokens = all(piece.has_tokens for piece in pieces if piece.num_sequences)
    kind, columns = samples_of(sources)
    columns = tuple(name for name in columns if has_tokens or name not in TOKEN_COLUMNS.names)
    check_room(folder, 24 * sum(piece.num_sequences for piece in pieces), "the analysis")
    writer = AnalysisWriter(folder, kind, columns)
    described: list[SourceEntry] = []
    try:
        for index, source in enumerate(sources):
            described.append(source.describe(writer.num_sequences))
            first_row = 0
            groups = _groups(kind, source, locate) + writer.num_sequences
            for piece in source.pieces:
                if piece.num_sequences:
                    own, groups = groups[: piece.num_sequences], groups[piece.num_sequences :]
                    _add(writer, index, first_row, piece, locate(piece.key), has_tokens, own)
                first_row += piece.num_rows
        _write_rejected(folder / REJECTED, sources, locate)
    except FileNotFoundError as error:
        raise UsageError(
            f"{error.filename} is gone: something else removed it from the cache", hint="run the command again"
        ) from error
    num_accounted = writer.num_sequences + rejected.total() + sum(entry["not_sampled"] for entry in described)
    assert sum(entry["records"] + entry["more_sequences"] for entry in described) == num_accounted
    writer.finish(
        sources=described,
        tokenizer=tokenizer and {name: value for name, value in tokenizer.items() if name != "template_hash"},
        template_hash=tokenizer and tokenizer["template_hash"],
        options=options.to_dict(),
        exact=not any(piece.is_estimated for piece in pieces),
        sample=options.sample,
        rejected=dict(sorted(rejected.items())),
        truncated={
            "num_sequences": sum(piece.num_truncated for piece in pieces),
            "num_tokens": sum(piece.num_truncated_tokens for piece in pieces),
        },
    )


def samples_of(sources: Sequence[Source]) -> tuple[str | None, tuple[str, ...]]:
    """The kind of samples that all sources with sequences have, and the columns that only these have.

    Raises DataError: two have other ones.
    """
    found: dict[tuple[str | None, tuple[str, ...]], Source] = {}
    for source in sources:
        if source.layout is not None and any(piece.num_sequences for piece in source.pieces):
            found.setdefault(source.layout.samples, source)
    if len(found) > 1:
        said = [
            f"{source.name} has {IN_WORDS[kind] if kind else 'ordinary data'}"
            + (f" with {', '.join(columns)}" if kind == "rollouts" else "")
            for (kind, columns), source in found.items()
        ]
        raise DataError(
            f"samples of two kinds, which no loss takes together: {', and '.join(said[:2])}",
            hint="analyze each into a folder of its own, with --workspace",
        )
    return next(iter(found), (None, ()))


def _groups(kind: str | None, source: Source, locate: Callable[[str], Path]) -> Int64Array:
    """The first sequence of the pair or group that each of a source is of, from 0; nothing of other samples."""
    places = np.arange(sum(piece.num_sequences for piece in source.pieces))
    if kind != "rollouts" or not places.size:
        return places - places % 2 if kind == "preference" else places
    pieces = [piece for piece in source.pieces if piece.num_sequences]
    hashes = np.concatenate([read_lengths(locate(piece.key))[3]["group"] for piece in pieces])
    _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
    return first[group]


def _nothing(sources: Sequence[Source], rejected: Counter[str], locate: Callable[[str], Path]) -> DataError:
    """The error of sources without a sequence, with the reasons why their records were left out."""
    examples: dict[str, str] = {}
    for _, _, reason, message in _rejections(sources, locate):
        examples.setdefault(reason, message)
    outcomes = [f"{count:,} {reason}: {examples[reason]}" for reason, count in rejected.most_common()]
    hint = "give files with at least one record that can be read"
    num_not_sampled = sum(piece.num_not_sampled for source in sources for piece in source.pieces)
    if num_not_sampled:
        outcomes.append("none in the sample" if not outcomes else f"{num_not_sampled:,} left out of the sample")
        hint = "take a larger --sample"
    elif len(rejected) == 1:
        [(reason, count)] = rejected.items()
        hint = HINTS_OF_ALL.get(reason, hint)
        if reason == "empty":
            outcomes = ["its record is blank" if count == 1 else f"all {count:,} records are blank"]
    names = [source.name for source in sources]
    several = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return DataError(
        f"no sequence in {', '.join(names[:8])}{several} ({'; '.join(outcomes) or 'no records'})", hint=hint
    )


def _add(
    writer: AnalysisWriter,
    source: int,
    first_row: int,
    piece: PieceResult,
    folder: Path,
    tokens: bool,
    groups: Int64Array,
) -> None:
    damaged = DataError("damaged: it is not what was written", where=str(folder), hint="analyze again with --no-cache")
    try:
        numbers, num_tokens, num_targets, stored = read_lengths(folder)
        more = {"label": np.arange(len(numbers)) % 2 == 0, **stored, "group": groups}  # labels of pairs are not stored
        if (len(numbers), int(num_tokens.sum(dtype=np.int64))) != (piece.num_sequences, piece.num_tokens):
            raise damaged
        records = numbers + first_row
        if tokens:
            writer.add_file(
                source,
                records,
                num_tokens,
                num_targets,
                more,
                path=folder / TOKENS,
                rows=piece.rows,
                digests=memoryview((folder / DIGESTS).read_bytes()),
                max_token_id=piece.max_token_id or 0,
            )
        else:
            writer.add_lengths(source, records, num_tokens, num_tokens - 1, more)
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of writing, or the piece is gone
        raise damaged from error


def _write_rejected(path: Path, sources: Sequence[Source], locate: Callable[[str], Path]) -> None:
    """One line for every record that was left out: file, line (or record, from 0), reason and message."""
    if not any(source.rejected for source in sources):
        return
    with path.open("w", encoding="utf-8") as file:
        for source, row, reason, message in _rejections(sources, locate):
            is_line = source.format == "jsonl"
            place = {"line" if is_line else "record": row if row is None else row + is_line}
            entry = {"file": source.name, **place, "reason": reason, "message": message}
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _rejections(
    sources: Sequence[Source], locate: Callable[[str], Path]
) -> Iterator[tuple[Source, int | None, str, str]]:
    """Every record that was left out, in order: its source, its row there (None: all the rest), reason and message."""
    for source in sources:
        first_row = 0
        for piece in source.pieces:
            if piece.rejected:
                for rejected in read_rejected(locate(piece.key)):
                    yield source, first_row + rejected.number, rejected.reason, rejected.message
            first_row += piece.num_rows
        if source.broken:
            yield source, None, source.broken.reason, source.broken.message
