"""Makes a frame of numbers of a plan, one row a step: what `inspect`, its page and `diff` show of steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from chunkplan.errors import DataError
from chunkplan.planfile.chunks import Chunks, read_chunks
from chunkplan.planfile.manifest import attention_patterns_of, reduction_us_of
from chunkplan.planfile.plan import VALIDATE_HINT, Plan
from chunkplan.planfile.schema import SCHEDULE, to_numpy
from chunkplan.planfile.tables import read_table
from chunkplan.summary import chunk_frame


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
    table = read_chunks(rows, attention_patterns_of(plan.manifest))
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


#: Of schedule.parquet, all but what stages do, which is most of a plan.
_STAGE_ENDS = pa.schema([field for field in SCHEDULE if field.name != "actions"])

_COUNTS = (
    *("step", "epoch", "num_sequences", "num_tokens", "num_target_tokens", "num_chunks", "num_standalone"),
    *("num_dependent", "num_zero_loss", "num_groups"),
)


def per_step(plan: Plan, chunks: pl.DataFrame | None = None) -> pl.DataFrame:
    """Count, weigh and time each step of `plan`, in order; `chunks` is its `chunk_frame`, if you have it.

    Example: `chunkplan.per_step(chunkplan.load_plan("plan"))`

    Columns (int64 unless said otherwise):

        step, epoch, num_sequences, num_tokens, num_target_tokens, num_chunks, num_standalone (zero-loss chunks too),
        num_dependent (mixed ones too), num_zero_loss, num_groups
        fill                 float64, tokens over ChunkSize of the chunks that are not zero-loss
        heaviest_over_mean   float64, predicted cost of the heaviest rank over the mean of the ranks, from 1
        heaviest_rank        its dp_rank
        recompute_share      float64, of the predicted cost
        exceeds_share, optimal   bool
        chunks_lower_bound, peak_retained_tokens
        predicted_us, lower_bound_us   float64, of the stages
        extra_forward_us     float64, in both, of forwards that the loss adds
        reduction_us         float64, what ranks take then; null where the plan does not describe model and GPU
        slowest_rank         the dp_rank whose stages are done last

    Raises:
        DataError: a file is damaged, steps are missing or times of them impossible.
    """
    chunks = plan_chunks(plan).frame if chunks is None else chunks
    steps = pl.DataFrame(pl.from_arrow(plan.steps()))
    _check_steps(steps, plan)
    stage_ends = pl.DataFrame(pl.from_arrow(read_table(plan.path / "schedule.parquet", _STAGE_ENDS)))
    is_grouped = pl.col("kind").is_in(("dependent", "mixed"))
    is_first = pl.col("dp_rank") == pl.col("cp_first_rank")  # a sequence that ranks share counts once
    counted = chunks.group_by("step").agg(
        num_standalone=(~is_grouped).sum(),
        num_dependent=is_grouped.sum(),
        num_zero_loss=(pl.col("kind") == "zero-loss").sum(),
        num_groups=(is_grouped & is_first & (pl.col("group_index") == 0)).sum(),
        cost=pl.col("cost").cast(pl.Float64).sum(),
    )
    rank_cost = chunks.group_by("step", "dp_rank", maintain_order=True).agg(pl.col("cost").cast(pl.Float64).sum())
    heaviest = (
        rank_cost.sort("step", "cost", "dp_rank", descending=[False, True, False])
        .group_by("step")
        .agg(
            heaviest_rank=pl.col("dp_rank").first(),
            heaviest_over_mean=(pl.col("cost").max() / pl.col("cost").mean()).fill_nan(1.0),
        )
    )
    slowest = (
        stage_ends.sort("step", "predicted_us", "dp_rank", descending=[False, True, False])
        .group_by("step")
        .agg(slowest_rank=pl.col("dp_rank").first())
    )
    num_filled = (pl.col("num_chunks").cast(pl.Int64) - pl.col("num_zero_loss")).clip(1)
    entries = plan.config.entries()
    whole = (*_COUNTS, "heaviest_rank", "chunks_lower_bound", "peak_retained_tokens", "slowest_rank")
    return (
        steps.join(counted, on="step", how="left")
        .join(heaviest, on="step", how="left")
        .join(slowest, on="step", how="left")
        .sort("step")
        .with_columns(
            fill=pl.col("num_tokens") / (num_filled * plan.config.chunk_size),
            recompute_share=(pl.col("recompute_us") / pl.col("cost")).fill_nan(0.0),
            predicted_us=pl.col("predicted_us").cast(pl.Float64),
            extra_forward_us=pl.col("extra_forward_us").cast(pl.Float64) if "loss" in entries else pl.lit(0.0),
            lower_bound_us=pl.col("lower_bound_us").cast(pl.Float64),
            reduction_us=pl.lit(reduction_us_of(plan.manifest), pl.Float64),
        )
        .with_columns(pl.col(whole).cast(pl.Int64))
        .select(
            *_COUNTS,
            *("fill", "heaviest_over_mean", "heaviest_rank", "recompute_share", "exceeds_share", "optimal"),
            *("chunks_lower_bound", "peak_retained_tokens", "predicted_us", "lower_bound_us"),
            *("extra_forward_us", "reduction_us", "slowest_rank"),
        )
    )


def _check_steps(steps: pl.DataFrame, plan: Plan) -> None:
    path, num_steps = plan.path / "steps.parquet", plan.manifest["totals"]["num_steps"]
    if steps["step"].to_list() != [*range(num_steps)]:
        raise DataError(
            f"the rows are not those of steps 0 to {num_steps - 1:,} in order", where=str(path), hint=VALIDATE_HINT
        )
    for name in ("predicted_us", "lower_bound_us", "recompute_us"):
        refuse_impossible(steps[name], name, str(path))
