"""Names for the array types that the planner passes around."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
