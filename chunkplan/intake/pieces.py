"""The unit of work of a process: a piece of a source, its records in batches, and the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from chunkplan.arrays import BoolArray, Float32Array, Int32Array, Int64Array, offsets_of
from chunkplan.intake.records import Record, Rejected

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

    `source` is the index of the source, `index` that of the piece in it. `path` is the file to open: the source's own
    file or URL, or a temporary file of a stream. `start` and `stop` are bytes of lines, or row groups (record batches)
    of a table. `origin` is the position of the piece in the whole source, in bytes or rows: it decides which records a
    sample takes. `num_bytes` are the bytes to read, of this `compression`, and `share` the bytes of the source's own
    file, which may be compressed, that they stand for.
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


#: Columns of `schema.SAMPLE_COLUMNS` by name, an entry a sequence.
SampleColumns = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class LengthColumn:
    """Lengths of records of which nothing else is known: int32 [n], from 1."""

    num_tokens: Int32Array


@dataclass(frozen=True)
class TokenColumns:
    """Ids and target masks of m sequences, one after another.

    `offsets` int64 [m + 1]; `input_ids` int32 and `target` bool [offsets[m]]; none is empty, first targets are false.
    By name `of_sequences` [m] and `of_tokens` [offsets[m]] have the columns that only samples have.
    """

    offsets: Int64Array
    input_ids: Int32Array
    target: BoolArray
    of_sequences: SampleColumns = field(default_factory=dict)
    of_tokens: Mapping[str, Float32Array] = field(default_factory=dict)

    def kept(self, is_kept: BoolArray, lengths: Int64Array) -> TokenColumns:
        """The sequences that are kept, bool [m], each cut to as many tokens as `lengths` [m] has."""
        before = np.diff(self.offsets)
        if is_kept.all() and np.array_equal(before, lengths):
            return self
        places = np.arange(self.offsets[-1]) - np.repeat(self.offsets[:-1], before)
        wanted = places < np.repeat(np.where(is_kept, lengths, 0), before)
        return TokenColumns(
            offsets_of(lengths[is_kept]),
            self.input_ids[wanted],
            self.target[wanted],
            {name: values[is_kept] for name, values in self.of_sequences.items()},
            {name: values[wanted] for name, values in self.of_tokens.items()},
        )


def token_columns(
    sequences: Sequence[tuple[Int32Array, BoolArray]], of_sequences: SampleColumns = MappingProxyType({})
) -> TokenColumns:
    """Ids and targets of sequences, at least one, as columns."""
    input_ids, target = (np.concatenate(arrays) for arrays in zip(*sequences, strict=True))
    return TokenColumns(offsets_of([len(ids) for ids, _ in sequences]), input_ids, target, of_sequences)


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


#: Parts of a conversation that a chat template may leave out or change: names in manifests, and meanings.
LEFT_OUT = {
    "system": "what the system message says",
    "user": "what the user says",
    "tool": "what a tool answers",
    "assistant": "what the assistant says",
    "other": "what a message of another role says",
    "thinking": "thinking of a message that counts",
    "end": "the token that ends the last turn",
}

#: Beside `LEFT_OUT`, with which they are counted: a token that counts begins in the prompt, or in a turn of somebody
#: else; and a chosen answer is the rejected one.
SHARED, EQUAL = "shared", "equal"


@dataclass
class PieceResult:
    """Counts of a piece that was read to its end.

    `key` names it in the store, `digest` is that of its bytes, and `reader` the name of its reader.

    `num_rows` are its lines or rows, `num_records` those that are not blank: with the `num_more` further sequences of
    records, the sum of sequences, rejections and those left out of the sample. `rows` are the numbers of sequences in
    the record batches of its token file, if `has_tokens`. With `is_estimated`, lengths were not counted by a tokenizer.
    `unread` has the most frequent of `num_unread` keys that were not read, with their number of records, None where
    unknown. `left_out` counts the sequences that the chat template leaves something out of, by kind, and
    `first_left_out` has the row of the first.
    """

    key: str
    digest: str
    reader: str
    num_rows: int = 0
    num_records: int = 0
    num_sequences: int = 0
    num_more: int = 0
    num_tokens: int = 0
    num_target_tokens: int = 0
    num_not_sampled: int = 0
    num_truncated: int = 0
    num_truncated_tokens: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    unread: dict[str, int | None] = field(default_factory=dict)
    num_unread: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    first_left_out: dict[str, int] = field(default_factory=dict)
    max_token_id: int | None = None
    has_tokens: bool = False
    is_estimated: bool = False
    rows: list[int] = field(default_factory=list)
    files: dict[str, list[int]] = field(default_factory=dict)  # of the store: size and time of the content

    @property
    def num_rejected(self) -> int:
        """Records that did not become sequences."""
        return sum(self.rejected.values())


def add_left_out(result: PieceResult, kinds: Iterable[str], number: int) -> None:
    """Count a sequence, of the record in row `number`, of which these kinds of `LEFT_OUT` are not there."""
    for kind in kinds:
        result.left_out[kind] = result.left_out.get(kind, 0) + 1
        result.first_left_out[kind] = min(number, result.first_left_out.get(kind, number))
