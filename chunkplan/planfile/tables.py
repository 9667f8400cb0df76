"""Reads a Parquet file that has to have the columns of a contract."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from chunkplan.errors import DataError

_HINT = "the file is damaged or not ours: write it again with `chunkplan analyze` or `chunkplan build`"


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a Parquet file that must have the columns of `schema`.

    Raises:
        DataError: it is missing, damaged, or has other columns.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), hint=_HINT) from error
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise DataError(f"columns {', '.join(missing)} are missing", where=str(path), hint=_HINT)
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise DataError(f"columns are not of the contract's types: {error}", where=str(path), hint=_HINT) from error
