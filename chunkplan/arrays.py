"""Names for the array types that the planner passes around, and what numpy lacks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def sum_runs(values: Int64Array, first: Int64Array) -> Int64Array:
    """Sums of values[first[i] : first[i + 1]]; runs may be empty."""
    total = np.concatenate([[0], np.cumsum(values)])
    sums: Int64Array = total[first[1:]] - total[first[:-1]]
    return sums
