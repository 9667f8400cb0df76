"""JSON lines: one a row, with the same keys as the columns of the `hf` format."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pyarrow as pa

from chunkplan.exporting.batches import RowBatch
from chunkplan.exporting.hf import labelled
from chunkplan.exporting.shards import write_shards


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
