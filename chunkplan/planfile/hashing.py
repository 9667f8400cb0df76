"""Content hashes: SHA-256 over column names and little-endian values in row order.

They identify what a file says. File bytes do not: Parquet and Arrow store the writer's version beside the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa


class ContentHasher:
    """Hashes a table that comes in any number of batches; how it was cut into batches does not change the digest.

    Every leaf column (a list adds its row lengths, a nullable column its validity) is one stream of bytes; the digest
    is SHA-256 over the name and digest of each stream.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._streams: dict[str, hashlib._Hash] = {}

    def update(self, batch: pa.RecordBatch | pa.Table) -> None:
        """Add the rows of `batch`, whose columns must be those of the schema."""
        for field in self._schema:
            column = batch.column(field.name)
            for array in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
                for name, values in _leaves(field.name, array, field.nullable):
                    self._streams.setdefault(name, hashlib.sha256()).update(values)

    def hexdigest(self) -> str:
        """The digest of all rows so far."""
        return combine_hashes({name: stream.hexdigest() for name, stream in self._streams.items()})


def combine_hashes(hashes: Mapping[str, str]) -> str:
    """One digest for several named ones, whatever their order."""
    total = hashlib.sha256()
    for name in sorted(hashes):
        total.update(f"{name}\0{hashes[name]}\0".encode())
    return total.hexdigest()


def content_hash(table: pa.Table, schema: pa.Schema) -> str:
    """The content hash of a whole table."""
    hasher = ContentHasher(schema)
    hasher.update(table)
    return hasher.hexdigest()


def _leaves(name: str, array: pa.Array, nullable: bool) -> Iterator[tuple[str, bytes]]:
    if nullable:
        yield f"{name}:valid", array.is_valid().to_numpy(zero_copy_only=False).tobytes()
        array = array.fill_null(0)
    kind = array.type
    if pa.types.is_list(kind):
        yield f"{name}:length", np.diff(array.offsets.to_numpy()).astype("<i8").tobytes()
        yield from _leaves(f"{name}.item", array.flatten(), nullable=False)
    elif pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            yield from _leaves(f"{name}.{kind.field(index).name}", array.field(index), nullable=False)
    elif pa.types.is_dictionary(kind):
        yield from _leaves(name, array.dictionary_decode(), nullable=False)
    elif pa.types.is_string(kind):
        yield name, "".join(f"{text}\0" for text in array.to_pylist()).encode()
    else:
        values = array.to_numpy(zero_copy_only=False)
        yield name, values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
