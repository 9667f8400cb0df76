"""Finds the slowest steps of a plan, and why each takes longer than the median step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict, cast

import polars as pl

from chunkplan.errors import DataError
from chunkplan.planfile.plan import VALIDATE_HINT

#: The time of a step is the product of these, over dp x pp: its tokens; what a token takes, forward and backward; the
#: work with recompute over that without; the work of its slowest rank over the mean rank's; and its time
#: over what a stage of that rank has to do.
Factor = Literal["tokens", "work", "recompute", "balance", "waiting"]
FACTORS: tuple[Factor, ...] = ("tokens", "work", "recompute", "balance", "waiting")

#: The cause where one split sequence explains more than any factor: it exceeds its rank's share, or without it the step
#: would have less of its work than by any factor brought back to the median. Tokens, work and balance all tell of it
#: then, and none of them alone.
SEQUENCE = "sequence"


class _StepRow(TypedDict):
    """A step of `_with_factors`: the `FACTORS`, and what words about them take.

    `largest_tokens` and `largest_share` are those of the split sequence that costs most: its tokens, or None without
    one, and its share (0..1) of the work.
    """

    tokens: float
    work: float
    recompute: float
    balance: float
    waiting: float
    step: int
    predicted_us: float
    num_tokens: int
    slowest_rank: int
    exceeds_share: bool
    recompute_share: float
    fill: float
    attention_pairs: float
    longest: int
    largest_tokens: int | None
    largest_share: float


@dataclass(frozen=True, kw_only=True)
class SlowStep:
    """A step that takes `over_median` times as long as the median step.

    `factors` [FACTORS] are how often each of the median step's goes into its own, so that their product is
    `over_median`; `cause` is the one that explains most of it, or `SEQUENCE`, and `why` says so in words.
    """

    step: int
    predicted_us: float
    over_median: float
    factors: dict[str, float]
    cause: str
    why: str


@dataclass(frozen=True, kw_only=True)
class StepTimeSummary:
    """Predicted microseconds of the steps of a plan; `slowest` has those that take longer than the median step (of an
    even number of steps the faster one in the middle), from the slowest on."""

    median_step: int
    median_us: float
    slowest: tuple[SlowStep, ...]


def step_times(steps: pl.DataFrame, chunks: pl.DataFrame, dp: int, pp: int, most: int = 5) -> StepTimeSummary:
    """Time the steps; say of the slowest, `most` at the most, why they are slow.

    `steps` is what `per_step` makes of `chunks`, which is a `chunk_frame`.

    Raises:
        DataError: rows of a step are missing.
    """
    ranked = steps.sort("predicted_us", "step", descending=[True, False])
    median = ranked["step"][ranked.height // 2]
    shown = ranked.head(most)["step"].to_list()
    rows = _with_factors(steps.filter(pl.col("step").is_in([*shown, median])), chunks, dp, pp)
    by_step = {row["step"]: row for row in cast(list[_StepRow], rows.to_dicts())}
    if missing := {*shown, median} - by_step.keys():
        raise DataError(
            "chunks or actions of the slowest rank are missing", where=f"step {min(missing)}", hint=VALIDATE_HINT
        )
    usual = by_step[median]
    slower = [step for step in shown if by_step[step]["predicted_us"] > usual["predicted_us"]]
    return StepTimeSummary(
        median_step=median,
        median_us=usual["predicted_us"],
        slowest=tuple(_explain(by_step[step], usual) for step in slower),
    )


def _with_factors(steps: pl.DataFrame, chunks: pl.DataFrame, dp: int, pp: int) -> pl.DataFrame:
    """`steps` with a column for each of `FACTORS`, and what words about them take."""
    shown = chunks.filter(pl.col("step").is_in(steps["step"].to_list())).with_columns(
        pl.col("step", "dp_rank").cast(pl.Int64), pl.col("cost").cast(pl.Float64)
    )
    of_step = shown.group_by("step").agg(
        step_cost=pl.col("cost").sum(), attention_pairs=pl.col("attention_pairs").sum(), longest=pl.col("reach").max()
    )
    of_rank = shown.group_by("step", slowest_rank="dp_rank").agg(rank_cost=pl.col("cost").sum())
    of_sequence = (
        shown.filter(pl.col("group_id").is_not_null())
        .with_columns(part=(pl.col("part_end") - pl.col("prefix_tokens")) / pl.col("num_tokens"))
        .group_by("step", "dp_rank", "group_id")
        .agg(largest_cost=(pl.col("cost") * pl.col("part")).sum(), largest_tokens=pl.col("part_end").max())
        .sort("largest_cost", "dp_rank", "group_id", descending=[True, False, False])
        .unique("step", keep="first")
        .drop("dp_rank", "group_id")
    )
    once = pl.col("step_cost") * (1 - pl.col("recompute_share"))
    return (
        steps.join(of_step, on="step")
        .join(of_rank, on=["step", "slowest_rank"])
        .join(of_sequence, on="step", how="left")
        .with_columns(
            tokens=pl.col("num_tokens").cast(pl.Float64),
            work=once / pl.col("num_tokens"),
            recompute=pl.col("step_cost") / once,
            balance=pl.col("rank_cost") * dp / pl.col("step_cost"),
            waiting=(pl.col("predicted_us") - pl.col("extra_forward_us")) * pp / pl.col("rank_cost"),
            largest_share=(pl.col("largest_cost") / pl.col("step_cost")).fill_null(0.0).fill_nan(0.0),
        )
    )


def _explain(row: _StepRow, usual: _StepRow) -> SlowStep:
    factors: dict[str, float] = {name: _ratio(row[name], usual[name]) for name in FACTORS}
    cause: str = max(FACTORS, key=lambda name: factors[name])
    if row["largest_share"] and (row["exceeds_share"] or factors[cause] * (1 - row["largest_share"]) < 1):
        cause = SEQUENCE
    return SlowStep(
        step=row["step"],
        predicted_us=row["predicted_us"],
        over_median=_ratio(row["predicted_us"], usual["predicted_us"]),
        factors=factors,
        cause=cause,
        why=_WORDS[cause](row, usual),
    )


def _ratio(value: float, usual: float) -> float:
    """Return `value / usual`, 1 where either is 0 or infinite, as in plans that predict no times."""
    ratio = value / usual if usual else 0.0
    return ratio if 0 < ratio < math.inf else 1.0


def _sequence(row: _StepRow, usual: _StepRow) -> str:
    said = f"one sequence of {row['largest_tokens']:,} tokens: "
    if row["exceeds_share"]:
        return f"{said}over a rank's share"
    return f"{said}{row['largest_share']:.0%} of the work"


def _tokens(row: _StepRow, usual: _StepRow) -> str:
    return f"{row['num_tokens']:,} tokens, {row['tokens'] / usual['tokens']:.2f} times the median step's"


def _work(row: _StepRow, usual: _StepRow) -> str:
    more = f"a token takes {row['work'] / usual['work']:.2f} times the work"
    if row["attention_pairs"] / row["num_tokens"] > usual["attention_pairs"] / usual["num_tokens"]:
        return f"attention of up to {row['longest']:,} tokens: {more}"
    return f"chunks {row['fill']:.0%} full: {more}"


def _recompute(row: _StepRow, usual: _StepRow) -> str:
    return f"{row['recompute_share']:.0%} of the work is recompute"


def _balance(row: _StepRow, usual: _StepRow) -> str:
    return f"rank {row['slowest_rank']} has {row['balance']:.2f} of the mean rank's work"


def _waiting(row: _StepRow, usual: _StepRow) -> str:
    return f"stages of rank {row['slowest_rank']} wait {1 - 1 / row['waiting']:.0%} of the time"


_WORDS: dict[str, Callable[[_StepRow, _StepRow], str]] = {
    SEQUENCE: _sequence,
    "tokens": _tokens,
    "work": _work,
    "recompute": _recompute,
    "balance": _balance,
    "waiting": _waiting,
}
