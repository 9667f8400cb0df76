"""Names for the array types that the planner passes around, and what numpy lacks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Int8Array = npt.NDArray[np.int8]
UInt64Array = npt.NDArray[np.uint64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


def offsets_of(lengths: npt.ArrayLike) -> Int64Array:
    """Start offsets of consecutive runs of `lengths` [n], and the end of the last one: int64 [n + 1]."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def sum_runs(values: Int64Array, first: Int64Array) -> Int64Array:
    """Sums of values[first[i] : first[i + 1]]; runs may be empty."""
    total = offsets_of(values)
    sums: Int64Array = total[first[1:]] - total[first[:-1]]
    return sums


def run_starts(values: IntArray) -> Int64Array:
    """The start of the run of equal values that each value is in; int64, of the shape of `values`, none of them -1."""
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    return np.repeat(starts, np.diff(np.append(starts, values.size)))


def split_mix(values: Int64Array) -> UInt64Array:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the values'th outputs of the generator seeded with 0."""
    mixed = (values.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
