"""What a schedule is: for every pipeline stage of a rank, what it does with which chunk, in order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.compiled import compiled
from chunkplan.planfile.schema import OPS

Int8Array = npt.NDArray[np.int8]

FORWARD, FORWARD_KV, RECOMPUTE, BACKWARD = (OPS.index(op) for op in ("forward", "forward_kv", "recompute", "backward"))


@compiled
def end_of_unit(group_id: Int32Array, first: int) -> int:
    """Where what begins with chunk `first` ends: a standalone chunk (-1 in `group_id`), or all chunks of a group."""
    last = first + 1
    while last < group_id.size and group_id[last] == group_id[first] >= 0:
        last += 1
    return last


class Actions(NamedTuple):
    """The actions of some stages, one stage after another.

    `ops` int8, `chunk_ids` int32 [num_actions]; `stages` int64 [num_stages + 1], where each stage's begin.
    """

    ops: Int8Array
    chunk_ids: Int32Array
    stages: Int64Array
