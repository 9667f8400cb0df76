"""chunks.parquet as a frame of numbers, one row a chunk: what reports of a plan are computed from."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa

from chunkplan.errors import DataError
from chunkplan.planfile.arrow import to_numpy
from chunkplan.planfile.plan import VALIDATE_HINT, Plan
from chunkplan.planfile.squares import with_squares

#: What a chunk may be: whole sequences; one part of a split one, alone or with whole ones; nothing but padding.
KINDS = ("standalone", "dependent", "mixed", "zero-loss")


def chunk_frame(plan: Plan) -> pl.DataFrame:
    """The columns of chunks.parquet but `segments`, in its order, and what these come to.

    `kind` is one of `KINDS`; `squares` is that of `with_squares`; `reach` (int64) is how far into a sequence the chunk
    gets: the largest `end` of its segments, 0 without any; `part_end` (int64) is the `end` of its first segment, which
    in a group is the part of the split sequence.

    Raises:
        DataError: the file is damaged, or has steps, ranks or tokens that the plan cannot have.
    """
    table = plan.chunks()
    _check_numbers(table, plan)
    lists = table.column("segments").combine_chunks()
    offsets = to_numpy(lists.offsets).astype(np.int64)
    offsets -= offsets[0]
    end = to_numpy(lists.flatten().field("end"))
    has_any = np.flatnonzero(np.diff(offsets))
    part_end = np.zeros(table.num_rows, np.int64)
    part_end[has_any] = end[offsets[has_any]]
    reach = np.zeros(table.num_rows, np.int64)
    reach[has_any] = np.maximum.reduceat(end, offsets[has_any]) if has_any.size else 0
    return (
        pl.DataFrame(pl.from_arrow(with_squares(table)))
        .with_columns(
            reach=pl.Series(reach),
            part_end=pl.Series(part_end),
            num_segments=pl.Series(np.diff(offsets)),
        )
        .with_columns(kind=_kind())
        .drop("num_segments")
    )


def _check_numbers(table: pa.Table, plan: Plan) -> None:
    """Raises DataError where a number cannot be one of this plan, so that nothing is counted that is not there."""
    num_steps, dp = plan.manifest["totals"]["num_steps"], plan.config.dp
    path = plan.path / "chunks.parquet"
    for name, most in (("step", num_steps - 1), ("dp_rank", dp - 1), ("num_tokens", plan.config.chunk_size)):
        values = to_numpy(table.column(name).combine_chunks())
        if values.min() < 0 or values.max() > most:
            wrong = values.min() if values.min() < 0 else values.max()
            raise DataError(f"`{name}` is {wrong}, expected 0 to {most}", where=str(path), hint=VALIDATE_HINT)
    if not values.any():
        raise DataError("no chunk has a token", where=str(path), hint=VALIDATE_HINT)
    refuse_impossible(pl.Series(table.column("cost")), "cost", str(path))


def refuse_impossible(times: pl.Series, name: str, where: str) -> None:
    """Raises DataError where `times`, microseconds, are not numbers from 0."""
    wrong = times.filter(~(times.is_finite() & (times >= 0)))
    if wrong.len():
        raise DataError(f"`{name}` is {wrong[0]}, expected a number from 0", where=where, hint=VALIDATE_HINT)


def _kind() -> pl.Expr:
    standalone, dependent, mixed, zero_loss = KINDS
    return (
        pl.when(pl.col("num_segments") == 0)
        .then(pl.lit(zero_loss))
        .when(pl.col("group_id").is_null())
        .then(pl.lit(standalone))
        .when(pl.col("num_segments") == 1)
        .then(pl.lit(dependent))
        .otherwise(pl.lit(mixed))
        .cast(pl.Enum(KINDS))
    )
