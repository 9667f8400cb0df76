"""Writes an analysis in bounded memory: sequence by sequence, or whole files of tokens that others have written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, IntArray, offsets_of
from chunkplan.planfile.hashing import ContentHasher, TokensHasher, combine_hashes, hash_of_evaluation, sequence_digests
from chunkplan.planfile.manifest import TokenFileEntry, write_manifest
from chunkplan.planfile.schema import SCHEMA_VERSION, SEQUENCES, TOKENS, analysis_schemas, to_arrow, to_numpy
from chunkplan.version import __version__

# Writes a file of tokens in bounded memory: record batches of a few million tokens, made to be memory-mapped.


#: A record batch is cut before either is passed, so that only a single sequence can make it larger: never beyond the
#: 2^31 - 1 offsets of an Arrow list.
_BATCH_TOKENS = 4 << 20
BATCH_ROWS = 4096


class TokenFile:
    """A new file of tokens at `path`. `rows` has the sequences of each record batch, once it is closed."""

    def __init__(self, path: Path, schema: pa.Schema = TOKENS) -> None:
        self.path = path
        self.rows: list[int] = []
        self.num_tokens = 0
        self._schema = schema
        self._file = pa.ipc.new_file(str(path), schema)
        self._waiting: list[tuple[npt.NDArray[Any], ...]] = []
        self._waiting_rows = self._waiting_tokens = 0

    def add(self, lengths: Int64Array, *columns: npt.NDArray[Any]) -> None:
        """Append n sequences: their lengths [n], and each column of the schema, one sequence after another."""
        start_token = start = 0
        stops = np.cumsum(lengths)
        while start < len(lengths):
            limit = start_token + _BATCH_TOKENS - self._waiting_tokens
            stop = int(np.searchsorted(stops, limit, side="right"))
            stop = min(stop, start + BATCH_ROWS - self._waiting_rows)
            if stop <= start and self._waiting_rows:
                self._flush()
                continue
            stop = max(stop, start + 1)
            tokens = slice(start_token, int(stops[stop - 1]))
            self._waiting.append((lengths[start:stop], *(values[tokens] for values in columns)))
            self._waiting_rows += stop - start
            self._waiting_tokens += tokens.stop - tokens.start
            self.num_tokens += tokens.stop - tokens.start
            start, start_token = stop, tokens.stop

    def close(self) -> None:
        """Write what is waiting, and the end of the file."""
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        if not self._waiting_rows:
            return
        lengths, *found = (np.concatenate(arrays) for arrays in zip(*self._waiting, strict=True))
        offsets = to_arrow(offsets_of(lengths).astype(np.int32))
        columns = [
            pa.ListArray.from_arrays(offsets, to_arrow(values), type=field.type)
            for field, values in zip(self._schema, found, strict=True)
        ]
        self._file.write_batch(pa.record_batch(columns, schema=self._schema))
        self.rows.append(self._waiting_rows)
        self._waiting, self._waiting_rows, self._waiting_tokens = [], 0, 0


#: A file of this many tokens stands for itself: what 8 MiB of text become. Smaller ones are copied together, up to
#: `TOKEN_FILE_TOKENS`.
OWN_FILE_TOKENS = 1 << 20
TOKEN_FILE_TOKENS = 64 << 20

#: What is added one by one waits for as many sequences or tokens.
WAITING_SEQUENCES, WAITING_TOKENS = 1 << 10, 1 << 20
#: Sequences that a row group of sequences.parquet has at least.
_ROW_GROUP = 1 << 17
#: Ids and records go up one by one: as differences they take a quarter of the room, and of the time to read and write.
_AS_DIFFERENCES = ("sequence_id", "record", "num_tokens", "num_target_tokens", "group")


#: Columns of ordinary samples beside those that all have.
NO_COLUMNS: Mapping[str, npt.NDArray[Any]] = MappingProxyType({})


class AnalysisWriter:
    """Writes the files of an analysis into `folder` (see `folder.replace_folder`) in bounded memory.

    Either every sequence comes with its tokens, or none does. Those of `samples` that are not ordinary come with
    `columns`, names out of `SAMPLE_COLUMNS` and `TOKEN_COLUMNS` of `schema`.
    """

    def __init__(self, folder: Path, samples: str | None = None, columns: Sequence[str] = ()) -> None:
        self._folder = folder
        self._samples, self._columns = samples, list(columns)
        sequences, self._token_schema = analysis_schemas(columns)
        self._table = _SequenceTable(folder / "sequences.parquet", sequences)
        self._token_files: list[TokenFileEntry] = []
        self._open: TokenFile | None = None
        self._hasher = TokensHasher()
        self._max_token_id: int | None = None
        self._waiting: list[tuple[int, int, Int32Array, BoolArray, Mapping[str, Any]]] = []
        self._waiting_tokens = 0
        self.num_sequences = 0

    def add(self, source: int, record: int, input_ids: Int32Array, target: BoolArray, **more: Any) -> None:
        """Append a sequence with its tokens: int32 [n] and bool [n], target[0] false.

        `more` has the columns of samples: a number each, or float32 [n] for those of tokens.
        """
        assert len(input_ids) == len(target) > 0 and not target[0]
        self._waiting.append((source, record, input_ids, target, more))
        self._waiting_tokens += len(input_ids)
        self.num_sequences += 1
        if len(self._waiting) >= WAITING_SEQUENCES or self._waiting_tokens >= WAITING_TOKENS:
            self._flush()

    def add_lengths(
        self,
        source: int,
        records: Int64Array,
        num_tokens: IntArray,
        num_targets: IntArray,
        more: Mapping[str, npt.NDArray[Any]] = NO_COLUMNS,
    ) -> None:
        """Append n sequences of a source of which only the lengths are known; all arrays [n], `more` of samples."""
        self._table.add(np.full(len(records), source), records, num_tokens, num_targets, more)
        self.num_sequences += len(records)

    def add_file(
        self,
        source: int,
        records: Int64Array,
        num_tokens: IntArray,
        num_targets: IntArray,
        more: Mapping[str, npt.NDArray[Any]] = NO_COLUMNS,
        *,
        path: Path,
        rows: Sequence[int],
        digests: memoryview,
        max_token_id: int,
    ) -> None:
        """Append the n sequences of a source whose tokens are in the file at `path` (see `token_file`).

        `more` are the columns of samples, [n]; `rows` the sequences of its record batches, `digests` those of its
        sequences (see `hashing`). The file is linked or, where it is small or cannot be linked, copied.
        """
        self._flush()
        first, self.num_sequences = self.num_sequences, self.num_sequences + len(records)
        self._table.add(np.full(len(records), source), records, num_tokens, num_targets, more)
        self._hasher.update(digests)
        self._max_token_id = max(self._max_token_id or 0, max_token_id)
        if num_tokens.sum(dtype=np.int64) < OWN_FILE_TOKENS:
            with pa.memory_map(str(path)) as mapped:
                file = pa.ipc.open_file(mapped)
                for index in range(file.num_record_batches):
                    lists = [file.get_batch(index).column(name) for name in self._token_schema.names]
                    lengths = np.diff(to_numpy(lists[0].offsets)).astype(np.int64)
                    self._write(lengths, *(to_numpy(each.flatten()) for each in lists))
            return
        self._close_token_file()
        self._token_files.append({"file": self._next_name(), "first_sequence_id": first, "rows": list(rows)})
        link_or_copy(path, self._folder / self._token_files[-1]["file"])

    def finish(self, **described: Any) -> dict[str, Any]:
        """Write what is left and the manifest, with the entries `described`; returns the manifest."""
        self._flush()
        self._close_token_file()
        hashes = {"sequences": self._table.close()}
        if self._token_files:
            hashes["tokens"] = self._hasher.hexdigest()
        hashes |= hash_of_evaluation(described.get("sources", []))
        manifest = {
            "kind": "analysis",
            "schema_version": SCHEMA_VERSION,
            "tool_version": __version__,
            "content_hash": combine_hashes(hashes),
            "content_hashes": hashes,
            "totals": {"num_sequences": self.num_sequences, **self._table.totals},
            "sources": [],
            "sample": None,
            "rejected": {},
            "truncated": {"num_sequences": 0, "num_tokens": 0},
            "max_token_id": self._max_token_id,
            "tokens": self._token_files,
            **({"samples": self._samples, "sample_columns": self._columns} if self._samples else {}),
            **described,
        }
        write_manifest(self._folder, manifest)
        return manifest

    def _flush(self) -> None:
        if not self._waiting:
            return
        sources, records, input_ids, targets, more = zip(*self._waiting, strict=True)
        lengths = np.array([len(ids) for ids in input_ids])
        ids, target = np.concatenate(input_ids).astype(np.int32, copy=False), np.concatenate(targets)
        of_sequences = {name: np.array([each[name] for each in more]) for name in self._table.more}
        num_targets = np.array([mask.sum() for mask in targets])
        self._table.add(np.array(sources), np.array(records), lengths, num_targets, of_sequences)
        others = [
            np.concatenate([each[name] for each in more]).astype(np.float32, copy=False)
            for name in self._token_schema.names[len(TOKENS) :]
        ]
        self._hasher.update(sequence_digests(offsets_of(lengths), ids, target, *others))
        self._max_token_id = max(self._max_token_id or 0, int(ids.max()))
        self._write(lengths, ids, target, *others)
        self._waiting, self._waiting_tokens = [], 0

    def _write(self, lengths: Int64Array, *columns: npt.NDArray[Any]) -> None:
        if self._open is None:
            first = sum(sum(each["rows"]) for each in self._token_files)
            self._token_files.append({"file": self._next_name(), "first_sequence_id": first, "rows": []})
            self._open = TokenFile(self._folder / self._token_files[-1]["file"], self._token_schema)
        self._open.add(lengths, *columns)
        if self._open.num_tokens >= TOKEN_FILE_TOKENS:
            self._close_token_file()

    def _next_name(self) -> str:
        (self._folder / "tokens").mkdir(exist_ok=True)
        return f"tokens/part-{len(self._token_files):05d}.arrow"

    def _close_token_file(self) -> None:
        if self._open is not None:
            self._open.close()
            self._token_files[-1]["rows"] = self._open.rows
        self._open = None


class _SequenceTable:
    """Writes sequences.parquet row group by row group."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        encoding = {name: "DELTA_BINARY_PACKED" for name in _AS_DIFFERENCES if name in schema.names}
        self._writer = pq.ParquetWriter(str(path), schema, use_dictionary=["source"], column_encoding=encoding)
        self._hasher = ContentHasher(schema)
        self._schema = schema
        self.more: list[str] = schema.names[len(SEQUENCES) :]
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting = self._num_sequences = 0
        self.totals = {"num_tokens": 0, "num_target_tokens": 0}

    def add(
        self,
        sources: IntArray,
        records: IntArray,
        num_tokens: IntArray,
        num_targets: IntArray,
        more: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        count = len(records)
        ids = np.arange(self._num_sequences, self._num_sequences + count)
        columns = (ids, sources, records, num_tokens, num_targets, *(more[name] for name in self.more))
        arrays = [
            to_arrow(values.astype(field.type.to_pandas_dtype(), copy=False))
            for values, field in zip(columns, self._schema, strict=True)
        ]
        self._waiting.append(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._num_sequences += count
        self._num_waiting += count
        self.totals["num_tokens"] += int(num_tokens.sum(dtype=np.int64))
        self.totals["num_target_tokens"] += int(num_targets.sum(dtype=np.int64))
        if self._num_waiting >= _ROW_GROUP:
            self._flush()

    def close(self) -> str:
        """The content hash of the table, whose file is whole now."""
        self._flush()
        self._writer.close()
        return self._hasher.hexdigest()

    def _flush(self) -> None:
        table = pa.Table.from_batches(self._waiting, self._schema)
        self._hasher.update(table)
        self._writer.write_table(table)
        self._waiting, self._num_waiting = [], 0


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, or a copy of it where file systems cannot link."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
