"""Reads Parquet files that have to have the columns of a contract: no more is taken from them, and no less."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from chunkplan.errors import DataError
from chunkplan.files.json_file import raise_if_unreadable
from chunkplan.planfile.hashing import ContentHasher
from chunkplan.planfile.schema import to_numpy

_HINT = "the file is damaged or not ours: write it again with `chunkplan analyze` or `chunkplan build`"

#: Bytes of the smallest numbers in memory.
_VALUE_BYTES = 4


@contextmanager
def open_parquet(path: Path, hint: str = _HINT) -> Iterator[pq.ParquetFile]:
    """A Parquet file, open as long as the context is; every damage that shows until then is an error of the file.

    Raises:
        DataError: it is missing, damaged, or says that it holds more than there is memory.
    """
    try:
        with pq.ParquetFile(path) as file:
            _refuse_huge(file.metadata)
            yield file
    except (OSError, ValueError, OverflowError, MemoryError, pa.ArrowException) as error:
        raise_if_unreadable(error)
        raise DataError(f"cannot be read: {error}", where=str(path), hint=hint) from error


def read_table(path: Path, schema: pa.Schema, *, may_be_empty: bool = False) -> pa.Table:
    """Read a Parquet file that must have the columns of `schema` and, unless it `may_be_empty`, at least one row.

    Raises:
        DataError: it is missing, damaged, empty, or is not as `conform` has it.
    """
    with open_parquet(path) as file:
        # All at once pyarrow cannot: the words of actions may be other ones in every row group.
        groups = (file.read_row_group(group, schema.names) for group in range(file.num_row_groups))
        tables = [conform(group, schema, path) for group in groups]
    if not may_be_empty and not any(table.num_rows for table in tables):
        raise DataError("has no rows", where=str(path), hint=_HINT)
    return pa.concat_tables([schema.empty_table(), *tables] if may_be_empty else tables)


def read_columns(
    path: Path, schema: pa.Schema, names: Sequence[str], look: Callable[[pa.Table], None] = lambda table: None
) -> tuple[dict[str, npt.NDArray[Any]], str]:
    """The columns `names`, of numbers, of a file as `read_table` reads it, and the content hash of all columns.

    It takes hardly more memory than these columns. `look` is called with every row group.

    Raises:
        DataError: as `read_table`.
    """
    hasher = ContentHasher(schema)
    with open_parquet(path) as file:
        num_rows = file.metadata.num_rows
        columns = {name: np.empty(num_rows, schema.field(name).type.to_pandas_dtype()) for name in names}
        row = 0
        for group in range(file.num_row_groups):
            table = conform(file.read_row_group(group, schema.names), schema, path)
            hasher.update(table)
            look(table)
            for name, values in columns.items():
                # What pyarrow itself makes of several chunks takes pandas, which takes long to import.
                np.concatenate(list(map(to_numpy, table.column(name).chunks)), out=values[row : row + table.num_rows])
            row += table.num_rows
        if row != num_rows:
            raise ValueError(f"{row:,} rows, {num_rows:,} stated")
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
        table = table.select(schema.names)
        table.validate(full=True)  # a file may say what it likes of where its values are
        table = table.cast(schema)
    except (KeyError, ValueError, pa.ArrowException) as error:
        raise DataError(f"columns are not of the contract's types: {error}", where=str(path), hint=_HINT) from error
    for field in schema:
        column = table.column(field.name)
        if any(_has_nulls(array, field.nullable) for array in column.chunks):
            raise DataError(f"column {field.name} has nulls", where=str(path), hint=_HINT)
        if not all(map(_is_finite, column.chunks)):
            raise DataError(f"column {field.name} has values that are not finite", where=str(path), hint=_HINT)
    return table


def _is_finite(array: pa.Array) -> bool:
    """Return whether numbers, of which none is null, or those of lists, are."""
    values = array.flatten() if pa.types.is_list(array.type) else array
    return not pa.types.is_floating(values.type) or bool(np.isfinite(to_numpy(values)).all())


def _has_nulls(array: pa.Array, allowed: bool) -> bool:
    if array.null_count and not allowed:
        return True
    if pa.types.is_list(array.type):
        return _has_nulls(array.flatten(), allowed=False)
    if pa.types.is_struct(array.type):
        return any(_has_nulls(child, allowed=False) for child in array.flatten())
    return False


def _refuse_huge(metadata: pq.FileMetaData) -> None:
    """Raises ValueError; a number that is repeated takes no room in a file, so that its size says nothing."""
    groups = (metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
    num_rows = max(metadata.num_rows, sum(groups))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_rows * metadata.num_columns * _VALUE_BYTES > memory:
        raise ValueError(f"{num_rows:,} rows of {metadata.num_columns} columns do not fit into memory")
