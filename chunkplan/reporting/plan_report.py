"""Figures of a plan in detail, as `chunkplan inspect` shows them and its Python twin returns them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from chunkplan.cost.model import CostModel
from chunkplan.errors import DataError
from chunkplan.planfile.load import load_plan
from chunkplan.planfile.plan import KINDS, Plan
from chunkplan.quantities import short_repr
from chunkplan.reporting.per_step import PlanChunks, per_step, plan_chunks
from chunkplan.reporting.plan_memory import PlanMemory, plan_memory
from chunkplan.reporting.shared_sequences import SharedRow, exchange_us, shared_rows
from chunkplan.reporting.slow_steps import StepTimeSummary, step_times
from chunkplan.summary import PlanSummary, summary_of

_NUM_BANDS = 10


@dataclass(frozen=True, kw_only=True)
class FillBand:
    """Chunks, zero-loss ones left out, with `low` < tokens over ChunkSize <= `high`."""

    low: float
    high: float
    num_chunks: int


@dataclass(frozen=True, kw_only=True)
class KindRow:
    """The chunks of a kind (`plan.KINDS`): how many, how full, and their shares (0..1) of the plan.

    `attention_share`: of the pairs of a query and a key, t (2 p + t) / 2 for a segment of t tokens that sees p earlier
    ones: over the parts of a sequence that is half its length squared.
    """

    kind: str
    num_chunks: int
    num_tokens: int
    fill: float
    token_share: float
    attention_share: float
    cost_share: float


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """Totals of a data-parallel rank over all steps: its predicted work, that over the mean of the ranks, and the
    number of steps in which it is last.

    The time of all steps, on a mean of its stages: `busy_us` with its chunks but for `exchange_us` with ranks that
    share them, `waiting_us` until all ranks are done, and then `reduction_us`, the same on all of them. Exchange and
    reduction are None where the plan does not describe the model and the GPU that it was made for.
    """

    dp_rank: int
    num_chunks: int
    num_tokens: int
    cost_us: float
    over_mean: float
    num_steps_slowest: int
    busy_us: float
    exchange_us: float | None
    waiting_us: float
    reduction_us: float | None


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan's `summary` and what lies behind it; times and memory are predictions.

    `fill`: ten bands. `kinds`: those there are. `shared`: by number of ranks. `ranks`: by dp_rank. `memory`: None where
    the plan does not describe the model and the GPU that it was made for.
    """

    summary: PlanSummary
    fill: tuple[FillBand, ...]
    kinds: tuple[KindRow, ...]
    shared: tuple[SharedRow, ...]
    ranks: tuple[RankRow, ...]
    times: StepTimeSummary
    memory: PlanMemory | None

    __repr__ = short_repr

    def to_dict(self) -> dict[str, Any]:
        """Return all of it, for one JSON document."""
        return {**asdict(self), "memory": self.memory and self.memory.to_dict()}


def plan_report(plan: Plan | str | Path) -> PlanReport:
    """Summarize all chunks and actions of a plan.

    Example: `chunkplan.plan_report("plan")`

    Raises:
        UsageError: there is no plan.
        DataError: a file is damaged.
    """
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    chunks = plan_chunks(plan)
    return report_of(plan, chunks, per_step(plan, chunks.frame))


def report_of(plan: Plan, chunks: PlanChunks, steps: pl.DataFrame) -> PlanReport:
    """Make the `plan_report` of a plan whose `chunk_frame` and `per_step` are there already."""
    config, cost = plan.config, _cost(plan)
    summary = summary_of(plan.steps(), chunks.frame, plan.manifest)
    return PlanReport(
        summary=summary,
        fill=_fill(chunks.frame, config.chunk_size),
        kinds=_kinds(chunks.frame, config.chunk_size),
        shared=shared_rows(chunks.frame, chunks.table, cost),
        ranks=_ranks(chunks, steps, summary, cost),
        times=step_times(steps, chunks.frame, config.dp, config.pp),
        memory=plan_memory(plan, chunks.table),
    )


def _cost(plan: Plan) -> CostModel | None:
    try:
        return plan.cost
    except DataError:
        return None


def _fill(chunks: pl.DataFrame, chunk_size: int) -> tuple[FillBand, ...]:
    band = (pl.col("num_tokens").cast(pl.Int64) * _NUM_BANDS - 1) // chunk_size  # full chunks are in the last band
    counted = chunks.filter(pl.col("num_tokens") > 0).group_by(band=band).len()
    counts = dict(counted.iter_rows())
    return tuple(
        FillBand(low=place / _NUM_BANDS, high=(place + 1) / _NUM_BANDS, num_chunks=counts.get(place, 0))
        for place in range(_NUM_BANDS)
    )


def _kinds(chunks: pl.DataFrame, chunk_size: int) -> tuple[KindRow, ...]:
    sums = chunks.group_by("kind", maintain_order=True).agg(  # sums of floats depend on the order
        pl.len().alias("num_chunks"),
        pl.col("num_tokens").cast(pl.Int64).sum(),
        pl.col("attention_pairs").sum(),
        pl.col("cost").cast(pl.Float64).sum(),
    )
    rows = {row["kind"]: row for row in sums.to_dicts()}
    in_all = {name: max(float(sums[name].sum()), 1e-30) for name in ("num_tokens", "attention_pairs", "cost")}
    return tuple(
        KindRow(
            kind=kind,
            num_chunks=row["num_chunks"],
            num_tokens=row["num_tokens"],
            fill=row["num_tokens"] / (row["num_chunks"] * chunk_size),
            token_share=row["num_tokens"] / in_all["num_tokens"],
            attention_share=row["attention_pairs"] / in_all["attention_pairs"],
            cost_share=row["cost"] / in_all["cost"],
        )
        for kind in KINDS
        if (row := rows.get(kind))
    )


def _ranks(
    chunks: PlanChunks, steps: pl.DataFrame, summary: PlanSummary, cost: CostModel | None
) -> tuple[RankRow, ...]:
    slowest = dict(steps.group_by("slowest_rank").len().iter_rows())
    exchange = np.zeros(chunks.frame.height) if cost is None else exchange_us(chunks.table, cost)
    rows = (
        chunks.frame.with_columns(exchange=pl.Series(exchange))
        .group_by("dp_rank", maintain_order=True)
        .agg(
            pl.len().alias("num_chunks"),
            pl.col("num_tokens").cast(pl.Int64).sum(),
            cost_us=pl.col("cost").cast(pl.Float64).sum(),
            exchange=pl.col("exchange").sum() / summary.pp,
        )
        .with_columns(over_mean=(pl.col("cost_us") / pl.col("cost_us").mean()).fill_nan(1.0))
        .sort("dp_rank")
    )
    return tuple(
        RankRow(
            **row,
            num_steps_slowest=slowest.get(row["dp_rank"], 0),
            busy_us=row["cost_us"] / summary.pp - of_exchange,
            exchange_us=None if cost is None else of_exchange,
            waiting_us=max(summary.predicted_us - summary.extra_forward_us - row["cost_us"] / summary.pp, 0.0),
            reduction_us=summary.reduction_us,
        )
        for row in rows.to_dicts()
        for of_exchange in [row.pop("exchange")]
    )
