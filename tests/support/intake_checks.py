"""What tests of the intake share: sources read whole, whatever their pieces and batches, and records encoded."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from chunkplan.intake.pieces import Batch, LengthColumn, Piece, TokenColumns
from chunkplan.intake.readers import cut, read
from chunkplan.intake.records import Record
from chunkplan.intake.rejection import RecordError, Rejected
from chunkplan.intake.schemas import Layout
from chunkplan.intake.sources import find_sources
from chunkplan.intake.tokenizer import Encoded, RecordTokenizer

TEXT = Layout("text", {"text": "text"}, "")
LENGTH = Layout("length", {"length": "length"}, "")
TOKENS = Layout("input_ids", {role: role for role in ("input_ids", "labels", "attention_mask")}, "")

#: More than any record of a test has.
LARGE = 64 << 20


def encode_all(tokenizer: RecordTokenizer, *records: Record) -> list[Encoded]:
    """The tokens of records that all have some."""
    encoded = []
    for one in tokenizer.encode(records):
        assert not isinstance(one, RecordError)
        encoded.append(one)
    return encoded


def pieces_of(path: Path | str, spool: Path) -> list[Piece]:
    """All pieces of one source."""
    (file,) = find_sources([path])
    return list(cut(file, 0, spool))


def batches_of(
    path: Path | str, layout: Layout, spool: Path, *, limit: int = LARGE, sample: float | None = None
) -> list[list[Batch]]:
    """The batches of every piece of one source; checks that they count what they hold."""
    found = []
    for piece in pieces_of(path, spool):
        batches = list(read(piece, layout, max_record_bytes=limit, sample=sample))
        for batch in batches:
            counted = len(batch.numbers) + len(batch.rejected)
            assert counted == batch.num_records if sample is None else counted <= batch.num_records
        found.append(batches)
    return found


def rows_of(batches: list[list[Batch]]) -> tuple[dict[int, Any], dict[int, Rejected]]:
    """Records and rejections by their row in the source; lengths are numbers, tokens pairs of lists."""
    records: dict[int, Any] = {}
    rejected: dict[int, Rejected] = {}
    row = 0
    for piece in batches:
        for batch in piece:
            match batch.records:
                case LengthColumn(num_tokens):
                    found = num_tokens.tolist()
                case TokenColumns(offsets, ids, target):
                    places = pairwise(offsets)
                    found = [(ids[a:b].tolist(), target[a:b].tolist()) for a, b in places]
                case list(found):
                    pass
            records |= dict(zip((row + batch.numbers).tolist(), found, strict=True))
            rejected |= {row + one.number: one._replace(number=row + one.number) for one in batch.rejected}
        row += sum(batch.num_rows for batch in piece)
    return records, rejected
