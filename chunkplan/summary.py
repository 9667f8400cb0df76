"""What a plan comes to: the numbers `build` prints and `inspect` shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from chunkplan.cost.durations import work_ns
from chunkplan.cost.model import CostModel
from chunkplan.errors import DataError
from chunkplan.planfile.chunk_frame import chunk_frame
from chunkplan.planfile.chunks import read_chunks
from chunkplan.planfile.manifest import config_of


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
    `recompute_share`: of the predicted cost. `chunks_over_bound`: num_chunks over the sum of lower bounds, whatever way
    the sequences of a step are assigned to ranks; `packing_over_bound`: given how they are.
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
    num_exceeding_steps: int
    exceeding_predicted_us: float
    exceeding_lower_bound_us: float
    exceeding_share: float
    num_optimal_steps: int
    chunks_over_bound: float
    packing_over_bound: float
    predicted_us: float
    lower_bound_us: float

    def to_dict(self) -> dict[str, Any]:
        """All of it, for one JSON document."""
        return asdict(self)


def summarize_plan(steps_table: pa.Table, chunks_table: pa.Table, manifest: dict[str, Any]) -> PlanSummary:
    """Summarize the tables `steps` and `chunks` of a plan with its manifest."""
    return summary_of(steps_table, chunk_frame(chunks_table, read_chunks(chunks_table)), manifest)


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
    work = _work_us(chunks, manifest["predictions"]["cost_model"])
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
        num_groups=dependent.filter(pl.col("group_index") == 0).height,
        token_fill=totals["num_tokens"] / (max(chunks.height - num_zero_loss, 1) * config.chunk_size),
        longest_sequence=totals["longest_sequence"],
        heaviest_over_mean=_over(_total(ranks["heaviest"]), _total(ranks["mean"])),
        heaviest_over_work=None if work is None else _over(_total(ranks["heaviest"]), work / config.dp),
        peak_retained_tokens=int(_float(steps["peak_retained_tokens"].max())),
        recompute_share=_total(steps["recompute_us"]) / max(_total(chunks["cost"]), 1e-30),
        num_exceeding_steps=exceeding.height,
        exceeding_predicted_us=_total(exceeding["predicted_us"]),
        exceeding_lower_bound_us=_total(exceeding["lower_bound_us"]),
        exceeding_share=excess_of_exceeding / _total(ranks["excess"]) if excess_of_exceeding else 0.0,
        num_optimal_steps=int(steps["optimal"].sum()),
        chunks_over_bound=chunks.height / _total(steps["chunks_lower_bound"]),
        packing_over_bound=chunks.height / _total(steps["packing_lower_bound"]),
        predicted_us=manifest["predictions"]["predicted_us"],
        lower_bound_us=manifest["predictions"]["lower_bound_us"],
    )


def _work_us(chunks: pl.DataFrame, cost_model: Any) -> float | None:
    """Forward and backward of all sequences, however they are cut: without recompute and what chunks cost beside."""
    try:
        cost = CostModel.from_dict(cost_model, where="manifest")
    except DataError:
        return None
    by_chunk = work_ns(cost, chunks["num_tokens"].to_numpy(), chunks["attention_pairs"].to_numpy())
    return float(by_chunk.sum(dtype=np.float64)) / 1e3


def _over(heaviest: float, usual: float) -> float:
    """How often `usual` goes into `heaviest`; 1 where nothing is predicted to take any time."""
    return heaviest / usual if heaviest else 1.0


def _total(values: pl.Series) -> float:
    """The sum in double precision: single loses microseconds over a large plan, and 32-bit counts overflow."""
    return _float(values.cast(pl.Float64).sum())


def _float(value: Any) -> float:
    return float(value)
