"""The squares of each row of chunks.parquet, in place of its segments: with its tokens, all its time depends on."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chunkplan.arrays import sum_runs
from chunkplan.cost.durations import squares_of
from chunkplan.planfile.arrow import to_numpy


def with_squares(chunks: pa.Table) -> pa.Table:
    """`chunks` without its column `segments`, and with `squares` (float64) as the last one.

    These sum t (2 p + t) over the chunk's segments of t tokens that each see p earlier ones: twice its pairs of a query
    and a key.
    """
    lists = chunks.column("segments").combine_chunks()
    offsets = to_numpy(lists.offsets).astype(np.int64)
    start, end = (to_numpy(lists.flatten().field(name)) for name in ("start", "end"))
    squares = squares_of(end - start, start).astype(np.int64)  # whole numbers, whose sums of runs stay exact
    sums = sum_runs(squares, offsets - offsets[0]).astype(np.float64)
    return chunks.drop_columns("segments").append_column("squares", pa.array(sums))
