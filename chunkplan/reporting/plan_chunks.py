"""The chunks of a plan, read and checked once for all reports of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from chunkplan.errors import DataError
from chunkplan.planfile.arrow import to_numpy
from chunkplan.planfile.chunk_frame import chunk_frame
from chunkplan.planfile.chunks import Chunks, read_chunks
from chunkplan.planfile.manifest import sights_of
from chunkplan.planfile.plan import VALIDATE_HINT, Plan


@dataclass(frozen=True)
class PlanChunks:
    """The table of a plan's chunks, and the same as a `chunk_frame`."""

    table: Chunks
    frame: pl.DataFrame


def plan_chunks(plan: Plan) -> PlanChunks:
    """Read the chunks of `plan`, in the order of chunks.parquet.

    Raises:
        DataError: the file is damaged, or has steps, ranks or tokens that the plan cannot have.
    """
    rows = plan.chunks()
    _check_numbers(rows, plan)
    table = read_chunks(rows, sights_of(plan.manifest))
    _check_order(rows, table, plan)
    return PlanChunks(table, chunk_frame(rows, table))


def _check_numbers(rows: pa.Table, plan: Plan) -> None:
    """Raises DataError where a number cannot be one of this plan, so that nothing is counted that is not there."""
    num_steps, dp = plan.manifest["totals"]["num_steps"], plan.config.dp
    path = plan.path / "chunks.parquet"
    for name, most in (("step", num_steps - 1), ("dp_rank", dp - 1), ("num_tokens", plan.config.chunk_size)):
        values = to_numpy(rows.column(name).combine_chunks())
        if values.min() < 0 or values.max() > most:
            wrong = values.min() if values.min() < 0 else values.max()
            raise DataError(f"`{name}` is {wrong}, expected 0 to {most}", where=str(path), hint=VALIDATE_HINT)
    if not values.any():
        raise DataError("no chunk has a token", where=str(path), hint=VALIDATE_HINT)
    refuse_impossible(pl.Series(rows.column("cost")), "cost", str(path))


def _check_order(rows: pa.Table, table: Chunks, plan: Plan) -> None:
    """Raises DataError where a rank of a step has no chunk, or where its chunks are not where they should be."""
    step, dp_rank = (to_numpy(rows.column(name).combine_chunks()) for name in ("step", "dp_rank"))
    starts = table.rank_chunks[:-1]
    place = step[starts].astype(np.int64) * plan.config.dp + dp_rank[starts]
    if not np.array_equal(place, np.arange(plan.manifest["totals"]["num_steps"] * plan.config.dp)):
        raise DataError(
            "the rows are not sorted, or ranks have no chunk",
            where=str(plan.path / "chunks.parquet"),
            hint=VALIDATE_HINT,
        )


def refuse_impossible(times: pl.Series, name: str, where: str) -> None:
    """Raises DataError where `times`, microseconds, are not numbers from 0."""
    wrong = times.filter(~(times.is_finite() & (times >= 0)))
    if wrong.len():
        raise DataError(f"`{name}` is {wrong[0]}, expected a number from 0", where=where, hint=VALIDATE_HINT)
