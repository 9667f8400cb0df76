"""A source of a run: its file, how its records are laid out, and the results of its pieces."""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from dataclasses import dataclass, field

from chunkplan.errors import DataError
from chunkplan.intake.rejection import Rejected
from chunkplan.intake.result import PieceResult
from chunkplan.intake.schemas import RecordLayout
from chunkplan.intake.sources import LINK, SourceFile
from chunkplan.planfile.analysis import record_place
from chunkplan.planfile.manifest_entries import SourceEntry
from chunkplan.planfile.unread_keys import add_unread, most_unread
from chunkplan.quantities import counted


@dataclass
class Source:
    """A source and the results of its pieces, which are added while a run goes on.

    `asked_columns` is the key of each role, and `asked_schema` the schema, where the user says it; `asked_ignored` are
    the keys to be ignored. `num_cut` pieces have been cut so far; `num_pieces` is None until all are.

    `reader` is that of its pieces, `num_left` how much of its file no piece stands for so far. `broken` is what ended a
    stream early, where the run goes on without the rest of it; `ends` a hash of how a file begins and ends, for shards
    to be compared.
    """

    file: SourceFile
    asked_columns: dict[str, str] = field(default_factory=dict)
    asked_schema: str | None = None
    asked_ignored: tuple[str, ...] = ()
    layout: RecordLayout | None = None
    reader: str | None = None
    results: dict[int, PieceResult] = field(default_factory=dict)
    num_cut: int = 0
    num_pieces: int | None = None
    broken: Rejected | None = None
    ends: str | None = None
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_left = sys.maxsize if self.file.num_bytes is None else self.file.num_bytes

    @property
    def is_complete(self) -> bool:
        """Whether all its pieces have been processed."""
        return self.num_pieces == len(self.results)

    @property
    def pieces(self) -> list[PieceResult]:
        """The results in the order of the source."""
        return [self.results[index] for index in sorted(self.results)]

    def place(self, piece: int, number: int | None) -> str:
        """Where a record is: file:line, or the record of a file that has no lines; all pieces before have ended."""
        if number is None or number < 0:
            return self.name
        return record_place(self.name, self.format, sum(one.num_rows for one in self.pieces[:piece]) + number)

    @property
    def name(self) -> str:
        """The path as it is shown and stored, on one line; names may be any bytes."""
        return os.fsencode(self.file.path).decode("utf-8", "backslashreplace").replace("\n", "\\n")

    @property
    def format(self) -> str:
        """The format that was read: its kind, or jsonl where a name says JSON and there are lines."""
        readers = {self.reader, *(piece.reader for piece in self.results.values())}
        return "jsonl" if "lines" in readers else self.file.kind

    def describe(self, first_sequence_id: int) -> SourceEntry:
        """The entry of the manifest for this source."""
        pieces = self.pieces
        left_out, first_left_out = self._left_out
        hashes = b"".join(bytes.fromhex(piece.digest) for piece in pieces)
        rejected = self.rejected
        unread: dict[str, int | None] = {}
        for piece in pieces:
            add_unread(unread, piece.unread)
        return {
            "path": self.name,
            "format": self.format,
            "compression": self.file.compression,
            "schema": None if self.layout is None else self.layout.schema,
            "columns": None if self.layout is None else self.layout.columns,
            "evidence": self._evidence,
            "bytes": self.file.num_bytes,
            "records": sum(piece.num_records for piece in pieces) + (self.broken is not None),
            "rejected": rejected.total(),
            "reasons": dict(sorted(rejected.items())),
            "not_sampled": sum(piece.num_not_sampled for piece in pieces),
            "content_hash": hashlib.sha256(hashes).hexdigest(),
            "first_sequence_id": first_sequence_id,
            "num_sequences": sum(piece.num_sequences for piece in pieces),
            "more_sequences": sum(piece.num_more for piece in pieces),
            "num_tokens": sum(piece.num_tokens for piece in pieces),
            "num_truncated": sum(piece.num_truncated for piece in pieces),
            "num_truncated_tokens": sum(piece.num_truncated_tokens for piece in pieces),
            "unread_keys": most_unread(unread),
            "num_unread_keys": max(len(unread), *(piece.num_unread for piece in pieces), 0),
            "left_out": left_out,
            "first_left_out": first_left_out,
        }

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
        """Why it was read with this layout, or was not read."""
        if self.file.kind == LINK:
            return "a link to a folder, which is not followed"
        if self.layout is not None:
            return self.layout.evidence
        return self.broken.message if self.broken else None

    def check_targets(self, max_length: int | None) -> None:
        """Refuse a source of conversations or prompts of which nothing at all would be trained.

        Raises:
            DataError: no token of its sequences counts in the loss.
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
