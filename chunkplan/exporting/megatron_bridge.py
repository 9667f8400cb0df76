"""Packed Parquet of NVIDIA Megatron-Bridge: its `GPTSFTPackedParquetDataset` (megatron/bridge/data/packing/parquet.py).

Its collator takes tokens [start, stop - 1) of a sequence as the input, [start + 1, stop) as labels and [start,
stop - 1) of `loss_mask`, which therefore stands where a target is predicted from and not where it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from chunkplan.exporting.batches import RowBatch
from chunkplan.exporting.shards import write_shards


def write_megatron_bridge(folder: Path, batches: Iterable[RowBatch], fingerprint: str) -> list[str]:
    """Write Parquet files, a row group a batch. Returns their names."""
    return write_shards(folder, "idx.parquet", map(_packed, batches), _open)


def _open(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    # Without dictionaries, which take as long as all the rest and make files of real text no smaller.
    return pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False)


def _packed(batch: RowBatch) -> pa.RecordBatch:
    starts = batch.segment_tokens[:-1]
    row_starts = np.repeat(batch.row_tokens[:-1], np.diff(batch.row_segments))
    # A segment's first token is no target, so that its last one predicts nothing once all are moved.
    loss_mask = np.append(batch.target[1:], False).astype(np.int8)
    return batch.to_arrow({"input_ids": batch.input_ids, "loss_mask": loss_mask}, {"seq_start_id": starts - row_starts})
