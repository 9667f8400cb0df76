"""The analysis: what the sequences of a dataset are, how long, and (unless only lengths are known) their tokens.

Tokens lie in uncompressed Arrow IPC files that are memory-mapped: reading one sequence touches its pages and no more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chunkplan.arrays import BoolArray, Float32Array, Int32Array, Int64Array, UInt64Array, offsets_of, split_mix
from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import DataError, UsageError
from chunkplan.files.json_file import raise_if_unreadable, refuse_outside
from chunkplan.planfile.hashing import TokensHasher, sequence_digests
from chunkplan.planfile.manifest import TokenFileEntry
from chunkplan.planfile.notebook import analysis_html
from chunkplan.planfile.schema import TOKEN_COLUMNS, analysis_schemas, to_numpy
from chunkplan.planfile.tables import conform, read_columns
from chunkplan.quantities import short_repr


@dataclass(frozen=True)
class Analysis:
    """An analysis folder, or a bare file of lengths. Arrays have one entry a sequence, in sequence_id order.

    Where sequences come from, `source` and `record`, is read when it is first asked for: it takes more memory than the
    lengths, and few ask.
    """

    path: Path
    num_tokens: Int32Array
    num_target_tokens: Int32Array
    content_hash: str
    manifest: dict[str, Any] = field(repr=False)

    __repr__ = short_repr

    @cached_property
    def source(self) -> Int32Array:
        """The source of every sequence, as its place in those of the manifest.

        Raises:
            DataError: the analysis was damaged or replaced since it was opened.
        """
        if self._is_bare:
            return np.broadcast_to(np.zeros(1, np.int32), self.num_sequences)  # takes no memory
        source: Int32Array = self._column("source")
        return source

    @cached_property
    def record(self) -> Int64Array:
        """The record of its source that every sequence is of, from 0; raises as `source`."""
        return np.arange(self.num_sequences) if self._is_bare else self._column("record")

    @cached_property
    def is_evaluation(self) -> BoolArray:
        """True for sequences of sources to evaluate on, bool [num_sequences]; raises as `source`."""
        marks = np.array([source.get("part") == "eval" for source in self.manifest.get("sources", [])], np.bool_)
        if not marks.any():
            return np.broadcast_to(np.zeros(1, np.bool_), self.num_sequences)  # takes no memory
        found: BoolArray = marks[self.source]
        return found

    @cached_property
    def is_evaluated_elsewhere(self) -> BoolArray:
        """True for training sequences with the same tokens as one to evaluate on, bool [num_sequences].

        Raises:
            DataError: the tokens cannot be read.
        """
        if not self.is_evaluation.any():
            return self.is_evaluation
        keys = self.content_keys
        return np.isin(keys, keys[self.is_evaluation]) & ~self.is_evaluation

    @property
    def samples(self) -> str | None:
        """The kind of samples, out of `losses.SAMPLES`: "preference", "labelled" or "rollouts"; None: ordinary ones."""
        samples: str | None = self.manifest.get("samples")
        return samples

    @cached_property
    def group(self) -> Int64Array | None:
        """The first sequence of the pair or group that each is of, which come in one step; int64 [num_sequences].

        None where samples have none, as for `label`, `reward` and `advantage`; all raise as `source`.
        """
        group: Int64Array | None = self._sample_column("group")
        return group

    @cached_property
    def label(self) -> BoolArray | None:
        """True where an answer is a chosen or a good one, bool [num_sequences]."""
        label: BoolArray | None = self._sample_column("label")
        return label

    @cached_property
    def reward(self) -> npt.NDArray[np.float64] | None:
        """The reward of each rollout, [num_sequences]."""
        reward: npt.NDArray[np.float64] | None = self._sample_column("reward")
        return reward

    @cached_property
    def advantage(self) -> npt.NDArray[np.float64] | None:
        """The advantage of each rollout where it is one number, [num_sequences]."""
        advantage: npt.NDArray[np.float64] | None = self._sample_column("advantage")
        return advantage

    @property
    def token_columns(self) -> tuple[str, ...]:
        """Numbers that the tokens of rollouts have, which `TokenReader.column` reads: names of `TOKEN_COLUMNS`."""
        columns = self.manifest.get("sample_columns", ())
        return tuple(name for name in TOKEN_COLUMNS.names if name in columns)

    def _sample_column(self, name: str) -> Any:
        return self._column(name) if name in self.manifest.get("sample_columns", ()) else None

    @property
    def _is_bare(self) -> bool:
        return bool(self.manifest["kind"] == "lengths")

    def _column(self, name: str) -> Any:
        path = self.path / "sequences.parquet"
        refuse_outside(path, self.path)
        schema, _ = analysis_schemas(self.manifest.get("sample_columns", ()))
        columns, found = read_columns(path, schema, [name])
        if found != self.manifest["content_hashes"]["sequences"]:
            raise DataError("replaced since it was opened", where=str(path), hint="open the analysis again")
        return columns[name]

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return len(self.num_tokens)

    @property
    def has_tokens(self) -> bool:
        """True if the tokens are stored; without them a plan can be built, not trained."""
        return bool(self.manifest.get("tokens"))

    @property
    def is_exact(self) -> bool:
        """False where lengths were estimated rather than counted by a tokenizer."""
        return bool(self.manifest["exact"])

    @property
    def options(self) -> IntakeOptions | None:
        """The options of the analysis; None where they are unknown, as of a bare file of lengths."""
        options = self.manifest.get("options")
        return None if options is None else IntakeOptions.from_entries(options)

    @property
    def sample(self) -> float | None:
        """The share of the records that were read; None where all were."""
        sample: float | None = self.manifest.get("sample")
        return sample

    def place(self, sequence_id: int) -> str:
        """The origin of a sequence: file:line, or the row of a file of lengths."""
        record = int(self.record[sequence_id])
        if not self.manifest.get("sources"):
            return f"{self.path}, row {record}"
        source = self.manifest["sources"][int(self.source[sequence_id])]
        return record_place(source["path"], source.get("format", "jsonl"), record)

    def rows_in(self, lengths: Int64Array) -> Int64Array:
        """The row of each sequence in a dataset of rows of `lengths` [n], which may have more that were left out here.

        Raises:
            DataError: the rows are not the sequences.
        """
        hint = (
            "plan the dataset's own: `from chunkplan.lengths import row_lengths`, "
            "`np.save('lengths.npy', row_lengths(dataset))`, then `chunkplan build lengths.npy`"
        )
        is_whole = lengths.size == self.num_sequences
        rows = np.arange(lengths.size) if is_whole else self.record
        if rows.max() >= lengths.size or not (is_whole or len(self.manifest.get("sources", [])) == 1):
            told = f"the dataset has {lengths.size:,} rows, the plan is of {self.num_sequences:,} sequences"
            raise DataError(told, where=str(self.path), hint=hint)
        for each in np.flatnonzero(lengths[rows] != self.num_tokens)[:1].tolist():
            told = f"{self.num_tokens[each]:,} tokens, row {rows[each]} of the dataset has {lengths[rows[each]]:,}"
            raise DataError(told, where=self.place(each), hint=hint)
        return rows

    def tokens(self) -> TokenReader:
        """Random access to the tokens. A file that the system does not let us read is its OSError.

        Raises:
            UsageError: the analysis holds lengths only, or is of a sample.
        """
        if not self.has_tokens:
            what = f"is of a sample of {100 * self.sample:g}%" if self.sample else "holds lengths only, no tokens"
            command = f"`chunkplan analyze DATA --tokenizer FILE`{' without --sample' if self.sample else ''}"
            raise UsageError(f"the analysis {self.path} {what}", hint=f"run {command}; plans are to be built of that")
        return TokenReader(self.path, self.manifest["tokens"], self.num_tokens, self.token_columns)

    @cached_property
    def content_keys(self) -> UInt64Array:
        """A key for every sequence, uint64 [num_sequences], evenly distributed and the same wherever it stands.

        The 8-byte BLAKE2b digest of its little-endian int32 token ids, read as a little-endian number; all tokens are
        read for it. Without tokens a mix of the sequence_id instead, so that what is appended changes no key, but
        copies of a text have different ones.

        Raises:
            DataError: the tokens cannot be read.
        """
        keys = split_mix(np.arange(self.num_sequences))
        if self.has_tokens:
            digests = []
            for _, batch in self.tokens().batches():
                ids = batch.column("input_ids")
                tokens = to_numpy(ids.values).astype("<i4", copy=False).view(np.uint8).data
                edges = pairwise((4 * to_numpy(ids.offsets).astype(np.int64)).tolist())
                digests += [hashlib.blake2b(tokens[start:end], digest_size=8).digest() for start, end in edges]
            keys = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
        keys.flags.writeable = False
        return keys

    def _repr_html_(self) -> str:
        return analysis_html(self.path, self.manifest, self.content_hash, self.num_tokens, self.num_target_tokens)


def record_place(path: str, kind: str, record: int) -> str:
    """The place of record `record` (from 0) of a source of that `kind`: file:line, or the number of the record."""
    if kind == "text":
        return path
    return f"{path}:{record + 1}" if kind == "jsonl" else f"{path}, record {record}"


#: Errors of pyarrow for a file that is truncated or overwritten.
_DAMAGED = (OSError, ValueError, OverflowError, MemoryError, pa.ArrowException)


def join_runs(views: Iterable[memoryview], starts: Int64Array, stops: Int64Array) -> bytearray:
    """Bytes [starts[i], stops[i]) of the i-th view, one run after another: half the time of numpy for runs of a KB."""
    return bytearray().join([view[i:j] for view, i, j in zip(views, starts.tolist(), stops.tolist(), strict=False)])


class TokenReader:
    """Reads tokens from memory-mapped token files. A record batch is checked when it is first used."""

    def __init__(
        self, folder: Path, token_files: Sequence[TokenFileEntry], num_tokens: Int32Array, columns: Sequence[str] = ()
    ) -> None:
        self._folder = folder
        self._token_files = token_files
        self._columns = tuple(columns)
        _, self._schema = analysis_schemas(columns)
        self._place: list[tuple[int, int]] = []  # of every record batch: (token file, batch within it)
        edges: list[tuple[int, int]] = []  # and the sequence_ids of its first row and one past its last
        for place, described in enumerate(token_files):
            stop = described["first_sequence_id"]
            for batch, rows in enumerate(described["rows"]):
                self._place.append((place, batch))
                edges.append((stop, stop + rows))
                stop += rows
        self._starts, self._stops = np.array(edges, np.int64).reshape(-1, 2).T.copy()
        # Where every sequence begins, counted in tokens from the first of the whole analysis.
        self._token_offsets = offsets_of(num_tokens)
        # Of the batches used so far: token ids, the bytes that hold the target bits, and which bit is the first.
        self._is_open = np.zeros(len(self._place), np.bool_)
        self._input_ids = [memoryview(b"")] * len(self._place)
        self._target = [memoryview(b"")] * len(self._place)
        self._first_bit = np.zeros(len(self._place), np.int64)
        self._more = {name: [memoryview(b"")] * len(self._place) for name in self._columns}

    def __reduce__(self) -> tuple[Any, ...]:
        """Worker processes map the files anew."""
        return TokenReader, (self._folder, self._token_files, np.diff(self._token_offsets), self._columns)

    def __call__(self, sequence_id: int) -> tuple[Int32Array, BoolArray]:
        """Token ids int32 [num_tokens] and target mask bool [num_tokens] of one sequence; raises as `gather` does."""
        length = self._token_offsets[sequence_id + 1] - self._token_offsets[sequence_id]
        return self.gather(np.array([sequence_id]), np.array([0]), np.array([length]))

    def gather(self, sequence_ids: Int64Array, starts: Int64Array, stops: Int64Array) -> tuple[Int32Array, BoolArray]:
        """Tokens [starts[i], stops[i]) of sequence_ids[i], one run after another: ids int32 and target mask bool [n].

        The sequences have to be there, and the runs within them.

        Raises:
            DataError: a token file is missing, torn, or does not hold what manifest and lengths say.
        """
        if not len(sequence_ids):
            return np.empty(0, np.int32), np.empty(0, np.bool_)
        which, offsets = self._find(sequence_ids)
        batches = which.tolist()
        token_starts, token_stops = offsets + starts, offsets + stops
        input_ids = join_runs(map(self._input_ids.__getitem__, batches), 4 * token_starts, 4 * token_stops)
        # Whole bytes of bits are fetched and unpacked in one go; what they hold besides the runs is then left out.
        bit_starts, bit_stops = token_starts + self._first_bit[which], token_stops + self._first_bit[which]
        low, high = bit_starts >> 3, (bit_stops + 7) >> 3
        bits = join_runs(map(self._target.__getitem__, batches), low, high)
        unpacked = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        bit_starts = 8 * (np.cumsum(high - low) - (high - low)) + (bit_starts & 7)
        target = join_runs(repeat(unpacked.data), bit_starts, bit_starts + (stops - starts))
        return np.frombuffer(input_ids, np.int32), np.frombuffer(target, np.bool_)

    def column(self, name: str, sequence_ids: Int64Array, starts: Int64Array, stops: Int64Array) -> Float32Array:
        """The numbers that tokens have in the column `name` of `Analysis.token_columns`, float32 [n], as `gather`."""
        which, offsets = self._find(sequence_ids)
        views = map(self._more[name].__getitem__, which.tolist())
        return np.frombuffer(join_runs(views, 4 * (offsets + starts), 4 * (offsets + stops)), np.float32)

    def _find(self, sequence_ids: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The record batch of each sequence, open now, and where in its tokens the sequence begins: each [n]."""
        which = np.searchsorted(self._starts, sequence_ids, side="right") - 1
        missing = np.flatnonzero((which < 0) | (sequence_ids >= self._stops[which]))
        if missing.size:
            message = f"sequence {sequence_ids[missing[0]]} is not where the manifest says"
            raise DataError(message, where=str(self._folder), hint="analyze again")
        for index in np.unique(which[~self._is_open[which]]).tolist():
            self._open(index)
        return which, self._token_offsets[sequence_ids] - self._token_offsets[self._starts[which]]

    def batches(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """All record batches in order, with the sequence_id of their first row: for what reads them all.

        Raises:
            DataError: as `gather`.
        """
        return ((int(self._starts[index]), self._batch(index)) for index in range(len(self._place)))

    def content_hash(self) -> str:
        """The content hash of all tokens, which are read for it. Raises as `gather`."""
        hasher = TokensHasher()
        for _, batch in self.batches():
            ids, target = batch.column("input_ids"), batch.column("target")
            offsets = to_numpy(ids.offsets).astype(np.int64)
            values, mask = to_numpy(ids.flatten()), to_numpy(target.flatten())
            more = [to_numpy(batch.column(name).flatten()) for name in self._columns]
            hasher.update(sequence_digests(offsets - offsets[0], values, mask, *more))
        return hasher.hexdigest()

    def _open(self, index: int) -> None:
        """Take a record batch into use."""
        batch = self._batch(index)
        ids, target = (batch.column(name).flatten() for name in ("input_ids", "target"))
        self._input_ids[index] = memoryview(ids.buffers()[1])[4 * ids.offset : 4 * (ids.offset + len(ids))]
        self._target[index], self._first_bit[index] = memoryview(target.buffers()[1]), target.offset
        for name, views in self._more.items():
            values = batch.column(name).flatten()
            views[index] = memoryview(values.buffers()[1])[4 * values.offset : 4 * (values.offset + len(values))]
        self._is_open[index] = True

    def _batch(self, index: int) -> pa.RecordBatch:
        """A record batch, once it is found to be where and as long as it should be."""
        file, batch_of_file = self._place[index]
        path, start = self._folder / str(self._token_files[file]["file"]), int(self._starts[index])
        refuse_outside(path, self._folder)
        try:
            # The file is not kept open, or thousands of them would be too many; what is mapped lives with the batch.
            batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(batch_of_file)
            batch.validate()
            table = conform(pa.Table.from_batches([batch]), self._schema, path)
        except _DAMAGED as error:
            raise_if_unreadable(error)
            raise DataError(f"cannot read the tokens: {error}", where=str(path), hint="analyze again") from error
        stated = self._token_offsets[start : self._stops[index] + 1] - self._token_offsets[start]
        for name in self._schema.names:
            offsets = to_numpy(batch.column(name).offsets)
            if not np.array_equal(offsets - offsets[0], stated):
                raise DataError(
                    f"sequences from {start} on do not have the lengths stated", where=str(path), hint="analyze again"
                )
        return table.to_batches()[0]
