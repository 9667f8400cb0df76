"""Tables and records as files of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def write_records(path: Path, records: list[dict[str, Any]], rows: int = 1 << 20) -> Path:
    """Records as the suffix says: JSON lines, an array, or a table in row groups or record batches of `rows`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".parquet", ".arrow"):
        kind = "parquet" if path.suffix == ".parquet" else "arrow file"
        return write_table(path, pa.Table.from_pylist(records), kind, rows)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    path.write_text(json.dumps(records) if path.suffix == ".json" else lines)
    return path
