"""Totals of a plan: the numbers that `build` prints and `inspect` shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from chunkplan.arrays import Int64Array, sum_runs
from chunkplan.cost.durations import Float64Array, whole_pairs, work_ns
from chunkplan.cost.model import CostModel
from chunkplan.operations import KEPT_ATTENTION
from chunkplan.planfile.chunks import Chunks, read_chunks
from chunkplan.planfile.manifest import attention_patterns_of, config_of, cost_of, reduction_us_of
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
    is_besides = chunks.start == 0  # what a tree holds besides begins further on
    is_besides[starts] = False
    besides = sum_runs(is_besides.astype(np.int64), chunks.segments)
    num_wholes = np.where(chunks.cp_size > 1, 1, (num_segments > 0) + besides)  # [n]
    kind = kind_of(chunks.group_id >= 0, num_wholes).astype(np.uint32)  # [n]
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


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """Counts, shares (0..1) and predictions (microseconds) of a whole plan.

    `token_fill`: tokens over ChunkSize of the chunks that are not zero-loss. `longest_sequence`: what a one-sequence
    micro-batch would hold at once. `heaviest_over_mean`: predicted cost of the heaviest rank, summed over all steps,
    over that of the mean rank, from 1; `heaviest_over_work`: over the steps' work / dp, which is forward and backward
    of their sequences without recompute and without what chunks cost beside their tokens; None where the plan does not
    describe the model and the GPU that it was made for. `exceeding` are the steps in which one sequence costs more than
    the mean rank: how many, what they take and cannot do without, whoever has it, and their share of what the heaviest
    ranks have above the mean. `peak_retained_tokens`: the most tokens whose activations a stage holds at once.
    `recompute_share`: of the predicted cost. `num_recomputed`: chunks that are run again; `num_kept`: how many of them
    keep attention for that, by where. `shared` are the sequences that ranks share, and what they are of the
    predicted cost; `unshared_lower_bound_us`: what the steps take at least where none is, with the same ChunkSize and
    K; None where none is shared, or as above. `chunks_over_bound`: num_chunks over the sum of lower bounds, whatever
    way the sequences of a step are assigned to ranks; `packing_over_bound`: given how they are. `predicted_us` and
    `lower_bound_us` are those of the stages. `extra_forward_us`: what of it are
    forwards that the loss adds. `reduction_us`: what ranks take after them, at the end of all steps
    together, to sum gradients and share what was updated; None as above. `total_us` is `predicted_us` with it, and
    `total_lower_bound_us` is `lower_bound_us` with it.
    """

    num_steps: int
    num_sequences: int
    num_tokens: int
    num_target_tokens: int
    num_dropped_sequences: int
    num_chunks: int
    num_standalone: int
    num_dependent: int
    num_zero_loss: int
    num_groups: int
    chunk_size: int
    k: int
    dp: int
    pp: int
    global_batch: int
    token_fill: float
    longest_sequence: int
    heaviest_over_mean: float
    heaviest_over_work: float | None
    peak_retained_tokens: int
    recompute_share: float
    num_recomputed: int
    num_kept: dict[str, int]
    num_shared_sequences: int
    shared_work_share: float
    unshared_lower_bound_us: float | None
    num_exceeding_steps: int
    exceeding_predicted_us: float
    exceeding_lower_bound_us: float
    exceeding_share: float
    num_optimal_steps: int
    chunks_over_bound: float
    packing_over_bound: float
    predicted_us: float
    lower_bound_us: float
    extra_forward_us: float
    reduction_us: float | None
    total_us: float
    total_lower_bound_us: float

    def to_dict(self) -> dict[str, Any]:
        """All of it, for one JSON document."""
        return asdict(self)


def summarize_plan(steps_table: pa.Table, chunks_table: pa.Table, manifest: dict[str, Any]) -> PlanSummary:
    """Summarize the tables `steps` and `chunks` of a plan with its manifest.

    Example: `chunkplan.summarize_plan(plan.steps(), plan.chunks(), plan.manifest)`
    """
    chunks = chunk_frame(chunks_table, read_chunks(chunks_table, attention_patterns_of(manifest)))
    return summary_of(steps_table, chunks, manifest)


def summary_of(steps_table: pa.Table, chunks: pl.DataFrame, manifest: dict[str, Any]) -> PlanSummary:
    """The `summarize_plan` of a plan whose `chunk_frame` is there already, with the columns `SUMMED` at least."""
    config, totals = config_of(manifest), manifest["totals"]
    steps = pl.DataFrame(pl.from_arrow(steps_table))
    dependent = chunks.filter(pl.col("kind").is_in(("dependent", "mixed")))
    exceeding = steps.filter("exceeds_share")
    ranks = (
        chunks.group_by("step", "dp_rank", maintain_order=True)  # sums of floats depend on the order
        .agg(pl.col("cost").cast(pl.Float64).sum())
        .group_by("step", maintain_order=True)
        .agg(heaviest=pl.col("cost").max(), mean=pl.col("cost").mean())
        .with_columns(excess=pl.col("heaviest") - pl.col("mean"))
    )
    excess_of_exceeding = _total(ranks.join(exceeding, on="step", how="semi")["excess"])
    cost = cost_of(manifest)
    of_a_step = reduction_us_of(manifest)
    reduction = None if of_a_step is None else of_a_step * totals["num_steps"]
    work = None if cost is None else _work_us(chunks, cost)
    is_first = pl.col("dp_rank") == pl.col("cp_first_rank")
    of_shared = chunks.filter(pl.col("cp_size") > 1)
    shared = (
        of_shared.filter(is_first)
        .group_by("step", "group_id", maintain_order=True)
        .agg(tokens=pl.col("cp_tokens").cast(pl.Int64).sum())
    )
    num_zero_loss = chunks.filter(pl.col("kind") == "zero-loss").height
    return PlanSummary(
        **{name: getattr(config, name) for name in ("chunk_size", "k", "dp", "pp", "global_batch")},
        **{
            name: totals[name]
            for name in ("num_steps", "num_sequences", "num_tokens", "num_target_tokens", "num_dropped_sequences")
        },
        num_chunks=chunks.height,
        num_standalone=chunks.height - dependent.height,
        num_dependent=dependent.height,
        num_zero_loss=num_zero_loss,
        num_groups=dependent.filter(is_first & (pl.col("group_index") == 0)).height,
        token_fill=totals.get("num_run_tokens", totals["num_tokens"])
        / (max(chunks.height - num_zero_loss, 1) * config.chunk_size),
        longest_sequence=totals["longest_sequence"],
        heaviest_over_mean=_over(_total(ranks["heaviest"]), _total(ranks["mean"])),
        heaviest_over_work=None if work is None else _over(_total(ranks["heaviest"]), work / config.dp),
        peak_retained_tokens=int(_float(steps["peak_retained_tokens"].max())),
        recompute_share=_total(steps["recompute_us"]) / max(_total(chunks["cost"]), 1e-30),
        num_recomputed=int((~chunks["keeps_activations"]).sum()),
        num_kept={where: int((chunks["kept_attention"] == where).sum()) for where in KEPT_ATTENTION if where},
        num_shared_sequences=shared.height,
        shared_work_share=_total(of_shared["cost"]) / max(_total(chunks["cost"]), 1e-30),
        unshared_lower_bound_us=None
        if cost is None or not shared.height
        else _unshared_bound_us(steps, shared, cost, config.pp),
        num_exceeding_steps=exceeding.height,
        exceeding_predicted_us=_total(exceeding["predicted_us"]),
        exceeding_lower_bound_us=_total(exceeding["lower_bound_us"]),
        exceeding_share=excess_of_exceeding / _total(ranks["excess"]) if excess_of_exceeding else 0.0,
        num_optimal_steps=int(steps["optimal"].sum()),
        chunks_over_bound=chunks.height / _total(steps["chunks_lower_bound"]),
        packing_over_bound=chunks.height / _total(steps["packing_lower_bound"]),
        predicted_us=manifest["predictions"]["predicted_us"],
        lower_bound_us=manifest["predictions"]["lower_bound_us"],
        extra_forward_us=_total(steps["extra_forward_us"]) if "extra_forward_us" in steps.columns else 0.0,
        reduction_us=reduction,
        total_us=manifest["predictions"]["predicted_us"] + (reduction or 0.0),
        total_lower_bound_us=manifest["predictions"]["lower_bound_us"] + (reduction or 0.0),
    )


def alone_us(cost: CostModel, num_tokens: Int64Array, pp: int) -> Float64Array:
    """The least time of a step with a sequence of `num_tokens` on one rank of `pp` stages, in microseconds; [n].

    That is its forward and its backward, in one chunk and without recompute.
    """
    alone = work_ns(cost, num_tokens, whole_pairs(cost, num_tokens))
    return (alone + cost.chunk_ns) // pp / 1e3


def _unshared_bound_us(steps: pl.DataFrame, shared: pl.DataFrame, cost: CostModel, pp: int) -> float:
    """The least time of all steps if none of the `shared` sequences were shared."""
    alone = shared.with_columns(alone=pl.Series(alone_us(cost, shared["tokens"].to_numpy(), pp)))
    by_step = steps.join(alone.group_by("step").agg(pl.col("alone").max()), on="step", how="left")
    return _total(by_step.select(pl.max_horizontal(pl.col("lower_bound_us").cast(pl.Float64), "alone")).to_series())


def _work_us(chunks: pl.DataFrame, cost: CostModel) -> float:
    """Forward and backward of all sequences, however they are cut: without recompute and what chunks cost beside."""
    by_chunk = work_ns(cost, chunks["num_tokens"].to_numpy(), chunks["attention_pairs"].to_numpy())
    return float(by_chunk.sum(dtype=np.float64)) / 1e3


def _over(heaviest: float, usual: float) -> float:
    """The ratio of `heaviest` to `usual`; 1 where all predicted times are 0."""
    return heaviest / usual if heaviest else 1.0


def _total(values: pl.Series) -> float:
    """The sum in double precision: single loses microseconds over a large plan, and 32-bit counts overflow."""
    return _float(values.cast(pl.Float64).sum())


def _float(value: Any) -> float:
    return float(value)
