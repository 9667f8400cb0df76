"""Content hashes: SHA-256 over column names and little-endian values in row order.

They identify what a file says. File bytes do not: Parquet and Arrow store the writer's version beside the data.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chunkplan.arrays import BoolArray, Float32Array, Int32Array, Int64Array
from chunkplan.planfile.schema import to_arrow, to_numpy, words_to_arrow


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
            self.update_column(field, batch.column(field.name))

    def hexdigest(self) -> str:
        """The digest of all rows so far."""
        return combine_hashes({name: stream.hexdigest() for name, stream in self._streams.items()})

    def update_column(self, field: pa.Field, column: pa.Array | pa.ChunkedArray) -> None:
        """Add the next values of one column."""
        for array in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            for name, values in _leaves(field.name, array, field.nullable):
                self._streams.setdefault(name, hashlib.sha256()).update(values)


def combine_hashes(hashes: Mapping[str, str]) -> str:
    """One digest for several named ones, whatever their order."""
    total = hashlib.sha256()
    for name in sorted(hashes):
        total.update(f"{name}\0{hashes[name]}\0".encode())
    return total.hexdigest()


def hash_of_evaluation(sources: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The content hash of which of the `sources` of an analysis are evaluated on, by its name; none if none is."""
    which = [index for index, source in enumerate(sources) if source.get("part") == "eval"]
    return {"evaluation": hashlib.sha256(str(which).encode()).hexdigest()} if which else {}


def content_hash(table: pa.Table, schema: pa.Schema) -> str:
    """The content hash of a whole table, columns side by side."""
    hasher = ContentHasher(schema)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda field: hasher.update_column(field, table.column(field.name)), schema))
    return hasher.hexdigest()


class TokensHasher:
    """The content hash of tokens: SHA-256 over the digest of every sequence, in order.

    The digest of a sequence is the SHA-256 of its ids as little-endian int32, then its target mask, a byte (0 or 1)
    each, and then its further columns, little-endian float32, in the order of the schema. So whoever has the digests of
    sequences need not read their tokens again to know the hash of all of them.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, digests: bytes | memoryview) -> None:
        """Add sequences by their digests, 32 bytes each."""
        self._hash.update(digests)

    def hexdigest(self) -> str:
        """The hash of all sequences so far."""
        return self._hash.hexdigest()


def sequence_digests(offsets: Int64Array, input_ids: Int32Array, target: BoolArray, *more: Float32Array) -> bytes:
    """The digests of n sequences, 32 bytes each, one after another; sequence i is [offsets[i], offsets[i + 1])."""
    ids, mask = memoryview(_bytes(input_ids.astype("<i4", copy=False))), memoryview(_bytes(target))
    others = [memoryview(_bytes(values.astype("<f4", copy=False))) for values in more]
    digests = []
    for start, end in pairwise(offsets.tolist()):
        digest = hashlib.sha256(ids[4 * start : 4 * end])
        digest.update(mask[start:end])
        for values in others:
            digest.update(values[4 * start : 4 * end])
        digests.append(digest.digest())
    return b"".join(digests)


def _leaves(name: str, array: pa.Array, nullable: bool) -> Iterator[tuple[str, bytes | memoryview]]:
    if nullable:
        valid = to_numpy(array.is_valid())
        yield f"{name}:valid", _bytes(valid)
        array = to_arrow(to_numpy(array) * valid)
    kind = array.type
    if pa.types.is_list(kind):
        yield f"{name}:length", _bytes(np.diff(to_numpy(array.offsets)).astype("<i8"))
        yield from _leaves(f"{name}.item", array.flatten(), nullable=False)
    elif pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            yield from _leaves(f"{name}.{kind.field(index).name}", array.field(index), nullable=False)
    elif pa.types.is_dictionary(kind):
        words = words_to_arrow([f"{word}\0" for word in array.dictionary.to_pylist()])
        text = words.take(array.indices).buffers()[2]  # the characters, one after another
        yield name, b"" if text is None else memoryview(text)
    else:
        values = to_numpy(array)
        yield name, _bytes(values.astype(values.dtype.newbyteorder("<"), copy=False))


def _bytes(values: npt.NDArray[Any]) -> bytes | memoryview:
    """The memory of an array, without a copy where it lies in one piece."""
    return np.ascontiguousarray(values).view(np.uint8).data
