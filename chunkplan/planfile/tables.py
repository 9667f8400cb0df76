"""Reads Parquet files that have to have the columns of a contract: no more is taken from them, and no less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from chunkplan.errors import DataError
from chunkplan.planfile.hashing import ContentHasher

_HINT = "the file is damaged or not ours: write it again with `chunkplan analyze` or `chunkplan build`"


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a Parquet file that must have the columns of `schema` and at least one row.

    Raises:
        DataError: it is missing, damaged, empty, or is not as `conform` has it.
    """
    try:
        table = pq.read_table(path)
    except PermissionError:
        raise
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), hint=_HINT) from error
    if not table.num_rows:
        raise DataError("has no rows", where=str(path), hint=_HINT)
    return conform(table, schema, path)


def read_columns(path: Path, schema: pa.Schema) -> tuple[dict[str, npt.NDArray[Any]], str]:
    """The columns of numbers of a file as `read_table` reads it, and its content hash, in hardly more memory than that.

    Raises:
        DataError: as `read_table`.
    """
    hasher = ContentHasher(schema)
    try:
        with pq.ParquetFile(path) as file:
            columns = {field.name: np.empty(file.metadata.num_rows, field.type.to_pandas_dtype()) for field in schema}
            row = 0
            for group in range(file.num_row_groups):
                table = conform(file.read_row_group(group), schema, path)
                hasher.update(table)
                for name, values in columns.items():
                    values[row : row + table.num_rows] = table.column(name).to_numpy()
                row += table.num_rows
    except PermissionError:
        raise
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), hint=_HINT) from error
    if not row:
        raise DataError("has no rows", where=str(path), hint=_HINT)
    return columns, hasher.hexdigest()


def conform(table: pa.Table, schema: pa.Schema, path: Path) -> pa.Table:
    """`table`, read from `path`, with the columns and types of `schema`.

    Raises:
        DataError: a column is missing, of another type, null where it may not be, or not finite.
    """
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise DataError(f"columns {', '.join(missing)} are missing", where=str(path), hint=_HINT)
    try:
        table = table.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise DataError(f"columns are not of the contract's types: {error}", where=str(path), hint=_HINT) from error
    for field in schema:
        column = table.column(field.name)
        if any(_has_nulls(array, field.nullable) for array in column.chunks):
            raise DataError(f"column {field.name} has nulls", where=str(path), hint=_HINT)
        if pa.types.is_floating(field.type) and not np.isfinite(column.to_numpy()).all():
            raise DataError(f"column {field.name} has values that are not finite", where=str(path), hint=_HINT)
    return table


def _has_nulls(array: pa.Array, allowed: bool) -> bool:
    if array.null_count and not allowed:
        return True
    if pa.types.is_list(array.type):
        return _has_nulls(array.flatten(), allowed=False)
    if pa.types.is_struct(array.type):
        return any(_has_nulls(child, allowed=False) for child in array.flatten())
    return False
