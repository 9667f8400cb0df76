"""What one process reads at once: a piece of a source, and the records of it in batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, offsets_of
from chunkplan.intake.records import Record
from chunkplan.intake.rejection import Rejected

#: How much is read at once, which changes memory and time and no result. What one process reads of a source before it
#: hands on what came of it:
PIECE_BYTES = 8 << 20

#: Whole lines are read together up to this many bytes; a longer line is read alone.
BLOCK_BYTES = 1 << 20

#: How much is fetched at once of what is behind a URL, where only its beginning is looked at, or what it has in it.
LOOK_BYTES = 1 << 18

#: Records in a batch: of any schema, and of those that are columns of numbers.
BATCH_RECORDS = 1024
COLUMN_RECORDS = 65_536


@dataclass(frozen=True, order=True)
class Piece:
    """A run of records of one source, cut the same way on every machine.

    `source` is the index of the source, `index` that of the piece in it. `path` is what to open: the source's own file
    or URL, or a temporary file that holds what was read from a stream. `start` and `stop` are bytes of lines, or row
    groups (record batches) of a table. `origin` is the position of the piece in the whole source, in bytes or rows:
    positions decide which records a sample takes. `num_bytes` is how much there is to read in it. `share` is how
    many bytes of the source's own file, which may be compressed, it stands for. `compression` is that of what is read.
    """

    source: int
    index: int
    path: str
    reader: str
    start: int
    stop: int
    origin: int
    is_temporary: bool = False
    num_bytes: int = 0
    share: int = 0
    compression: str | None = None


@dataclass(frozen=True)
class LengthColumn:
    """Lengths of records of which nothing else is known: int32 [n], from 1."""

    num_tokens: Int32Array


@dataclass(frozen=True)
class TokenColumns:
    """Ids and target masks of m sequences, one after another.

    `offsets` int64 [m + 1]; `input_ids` int32 and `target` bool [offsets[m]]; none is empty, first targets are false.
    """

    offsets: Int64Array
    input_ids: Int32Array
    target: BoolArray


def token_columns(sequences: Sequence[tuple[Int32Array, BoolArray]]) -> TokenColumns:
    """Ids and targets of sequences, at least one, as columns."""
    input_ids, target = (np.concatenate(arrays) for arrays in zip(*sequences, strict=True))
    return TokenColumns(offsets_of([len(ids) for ids, _ in sequences]), input_ids, target)


@dataclass(frozen=True)
class Batch:
    """Records that were read together, in order.

    `numbers` [n] are the lines or rows of `records` within the piece, from 0; `rejected` has the lines and rows that
    could not become a record. `num_records` counts both, and the records that a sample left out; blank lines are none.
    `num_rows` counts the lines or rows, with blank ones, and `num_bytes` the bytes of the piece that were read: both
    since the last batch. `unread` has the keys that were not read, with the number of records that have them, or None
    where that number is not known.
    """

    numbers: Int64Array
    records: list[Record] | LengthColumn
    num_records: int
    num_rows: int
    num_bytes: int
    rejected: list[Rejected] = field(default_factory=list)
    unread: Mapping[str, int | None] = field(default_factory=dict)
