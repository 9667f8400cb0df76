"""The table of chunks as a frame, for sums by step, rank and kind: what reports of a plan are computed from."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa

from chunkplan.planfile.chunks import Chunks
from chunkplan.planfile.plan import KINDS, kind_of

#: The columns that a summary of a plan looks at.
SUMMED = (
    *("step", "dp_rank", "group_id", "group_index", "num_tokens", "cost", "attention_pairs", "kind"),
    *("cp_first_rank", "cp_size", "cp_tokens", "keeps_activations", "kept_attention"),
)


def chunk_frame(rows: pa.Table, chunks: Chunks) -> pl.DataFrame:
    """The columns of `rows` of chunks.parquet but `segments`, and what these come to by `chunks`, the same rows.

    `kind` is one of `KINDS`; `attention_pairs` is that of `chunks`; `reach` (int64) is how far into a sequence the
    chunk gets: the largest `end` of its segments, 0 without any; `part_end` (int64) is the `end` of its first segment,
    which in a group is the part of the split sequence; of a shared chunk that of the whole one. The columns `cp_*` are
    there for all plans: a chunk that is not shared is one of its own rank alone.
    """
    num_segments = np.diff(chunks.segments)  # [n]
    has_any = np.flatnonzero(num_segments)
    starts = chunks.segments[has_any]  # [chunks with segments]
    part_end = np.zeros(num_segments.size, np.int64)  # [n]
    part_end[has_any] = chunks.end[starts]
    part_end = np.where(chunks.cp_size > 1, chunks.prefix_tokens + chunks.cp_tokens, part_end)
    reach = np.zeros(num_segments.size, np.int64)  # [n]
    reach[has_any] = np.maximum.reduceat(chunks.end, starts) if has_any.size else 0
    num_sequences = np.where(chunks.cp_size > 1, 1, num_segments)  # [n], whose tokens are in it
    kind = kind_of(chunks.group_id >= 0, num_sequences).astype(np.uint32)  # [n]
    is_shared = pl.Series(chunks.cp_size > 1)
    return pl.DataFrame(pl.from_arrow(rows.drop_columns("segments"))).with_columns(
        cp_first_rank=pl.when(is_shared).then(pl.Series(chunks.cp_first_rank)).otherwise(pl.col("dp_rank")),
        cp_size=pl.Series(chunks.cp_size),
        cp_heads=pl.Series(chunks.cp_heads),
        cp_tokens=pl.when(is_shared).then(pl.Series(chunks.cp_tokens)).otherwise(pl.col("num_tokens")),
        attention_pairs=pl.Series(chunks.attention_pairs),
        reach=pl.Series(reach),
        part_end=pl.Series(part_end),
        kind=pl.Series(KINDS, dtype=pl.Enum(KINDS)).gather(pl.Series(kind)),
    )
