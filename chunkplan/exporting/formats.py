"""Formats of exported rows (Hugging Face datasets, JSON lines, Megatron-Bridge), in shards: data-00000-of-00003."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from chunkplan.exporting.batches import RowBatch
from chunkplan.files.json_file import write_json

# A dataset of Hugging Face `datasets`, as its `save_to_disk` lays it out; columns as TRL's SFTTrainer names them.


#: The label that these trainers leave out of the loss.
_IGNORED = -100


def write_hf(folder: Path, batches: Iterable[RowBatch], fingerprint: str) -> list[str]:
    """Write a folder for `datasets.load_from_disk`, whose caches know it by `fingerprint`. Returns names of files."""
    names = write_shards(
        folder, "arrow", map(labelled, batches), lambda path, schema: pa.ipc.new_stream(str(path), schema)
    )
    state: dict[str, object] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    write_json(folder / "state.json", state, indent=2)
    write_json(folder / "dataset_info.json", {"description": "Packed rows, written by chunkplan export."}, indent=2)
    return names


def labelled(batch: RowBatch) -> pa.RecordBatch:
    """Rows with labels where their targets are: the trainer shifts them."""
    labels = np.where(batch.target, batch.input_ids, np.int32(_IGNORED))
    return batch.to_arrow(
        {"input_ids": batch.input_ids, "labels": labels}, {"seq_lengths": np.diff(batch.segment_tokens)}
    )


# JSON lines: one a row, with the same keys as the columns of the `hf` format.


class _Lines:
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file = path.open("wb")
        self._encoder = msgspec.json.Encoder()

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self._file.write(self._encoder.encode_lines(batch.to_pylist()))

    def close(self) -> None:
        self._file.close()


def write_jsonl(folder: Path, batches: Iterable[RowBatch], fingerprint: str) -> list[str]:
    """Write files of JSON lines. Returns their names."""
    return write_shards(folder, "jsonl", map(labelled, batches), _Lines)


# Packed Parquet of NVIDIA Megatron-Bridge: its `GPTSFTPackedParquetDataset` (megatron/bridge/data/packing/parquet.py).
#
# Its collator takes tokens [start, stop - 1) of a sequence as the input, [start + 1, stop) as labels and [start,
# stop - 1) of `loss_mask`, which therefore stands where a target is predicted from and not where it is.


def write_megatron_bridge(folder: Path, batches: Iterable[RowBatch], fingerprint: str) -> list[str]:
    """Write Parquet files, a row group a batch. Returns their names."""
    return write_shards(folder, "idx.parquet", map(_packed, batches), _open)


def _open(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    # Without dictionaries, which take as long as all the rest and make files of real text no smaller.
    return pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False)


def _packed(batch: RowBatch) -> pa.RecordBatch:
    starts = batch.segment_tokens[:-1]
    row_starts = np.repeat(batch.row_tokens[:-1], np.diff(batch.row_segments))
    loss_mask = batch.predicts.astype(np.int8)
    return batch.to_arrow({"input_ids": batch.input_ids, "loss_mask": loss_mask}, {"seq_start_id": starts - row_starts})


#: A file is ended after so many bytes, counted before any compression.
_SHARD_BYTES = 500_000_000


class ShardFile(Protocol):
    """A sink of record batches, such as a writer of pyarrow."""

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Append some rows."""

    def close(self) -> None:
        """Write what is waiting, and the end of the file."""


def write_shards(
    folder: Path,
    suffix: str,
    batches: Iterable[pa.RecordBatch],
    open_file: Callable[[Path, pa.Schema], ShardFile],
    shard_bytes: int = _SHARD_BYTES,
) -> list[str]:
    """Write `batches` to as many files in `folder` as it takes, and return their names, in order."""
    written: list[Path] = []
    waiting = iter(batches)
    for first in waiting:
        written.append(folder / f"{len(written)}.{suffix}")
        with closing(open_file(written[-1], first.schema)) as file:
            size = 0
            for batch in chain([first], waiting):
                file.write_batch(batch)
                size += batch.nbytes
                if size >= shard_bytes:
                    break
    names = [f"data-{index:05d}-of-{len(written):05d}.{suffix}" for index in range(len(written))]
    for path, name in zip(written, names, strict=True):
        path.rename(folder / name)
    return names
