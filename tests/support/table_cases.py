"""What tests of tables share: tables as files of every kind."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

KINDS = ["parquet", "arrow file", "arrow stream"]


def write_table(path: Path, table: pa.Table, kind: str, rows: int = 1 << 20) -> Path:
    """A table in a file of a kind, in row groups or record batches of `rows`."""
    path = path.with_suffix("." + kind.split(maxsplit=1)[0])
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=rows)
        return path
    new = pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path
