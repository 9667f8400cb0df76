"""numpy arrays as Arrow arrays and back, without a copy.

pyarrow's own `pa.array` and `to_numpy` first import pandas where that is installed, as it is wherever OR-Tools is, and
that takes longer than all the rest of reading a small plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def to_arrow(values: npt.NDArray[Any], valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """The Arrow array of numbers or booleans; null where not `valid`."""
    validity = None if valid is None else _bits(valid)
    data = _bits(values) if values.dtype == np.bool_ else pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), values.size, [validity, data])


def words_to_arrow(words: Sequence[str]) -> pa.StringArray:
    """A few strings as an Arrow array."""
    encoded = [word.encode() for word in words]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(encoded), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def codes_of(column: pa.ChunkedArray, words: Sequence[str]) -> npt.NDArray[np.int8]:
    """The place of each word of a dictionary-encoded column in `words`, -1 where it is none of them."""
    place = {word: code for code, word in enumerate(words)}
    codes = [np.empty(0, np.int8)]
    for array in column.chunks:
        known = np.array([place.get(word, -1) for word in array.dictionary.to_pylist()], np.int8)
        codes.append(known[to_numpy(array.indices)])
    return np.concatenate(codes)


def to_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """The numbers or booleans (these are copied) of an Arrow array; what is null is anything."""
    data = array.buffers()[1] or b""
    if pa.types.is_boolean(array.type):
        bits = np.frombuffer(data, np.uint8)
        return np.unpackbits(bits, bitorder="little")[array.offset : array.offset + len(array)].astype(np.bool_)
    dtype = np.dtype(array.type.to_pandas_dtype())
    return np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)


def _bits(values: npt.NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
