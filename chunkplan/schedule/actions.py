"""What a schedule is: for every pipeline stage of a rank, what it does with which chunk, in order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.planfile.schema import OPS

Int8Array = npt.NDArray[np.int8]

FORWARD, FORWARD_KV, RECOMPUTE, BACKWARD = (OPS.index(op) for op in ("forward", "forward_kv", "recompute", "backward"))


class Actions(NamedTuple):
    """The actions of some stages, one stage after another.

    `ops` int8, `chunk_ids` int32 [num_actions]; `stages` int64 [num_stages + 1], where each stage's begin.
    """

    ops: Int8Array
    chunk_ids: Int32Array
    stages: Int64Array
