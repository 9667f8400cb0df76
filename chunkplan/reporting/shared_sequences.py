"""Sequences that ranks share: by how many, in which way, and what of their time is exchange."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from chunkplan.cost.durations import Float64Array
from chunkplan.cost.model import CostModel
from chunkplan.errors import DataError
from chunkplan.operations import NOT_KEPT
from chunkplan.planfile.chunks import Chunks, chunks_of_rows, exchange_of
from chunkplan.planfile.plan import Plan, PlanStep
from chunkplan.summary import alone_us


@dataclass(frozen=True, kw_only=True)
class SharedRow:
    """The sequences of a plan that `num_ranks` ranks share each, `num_heads` of which share the heads, others pages.

    `work_share` (0..1): of the predicted cost of the plan; `exchange_share`: of their own cost, the exchange between
    ranks, None if the plan does not describe its model and GPU.
    """

    num_ranks: int
    num_heads: int
    num_sequences: int
    num_tokens: int
    work_share: float
    exchange_share: float | None


@dataclass(frozen=True, kw_only=True)
class SharedSequence:
    """A sequence of a step that `num_ranks` ranks from `first_rank` on share, `num_heads` of which share the heads.

    `predicted_us`: its time on the rank with most of it; `exchange_us`: the exchange in that, None if unknown.
    """

    sequence_id: int
    num_tokens: int
    first_rank: int
    num_ranks: int
    num_heads: int
    num_chunks: int
    predicted_us: float
    exchange_us: float | None


@dataclass(frozen=True, kw_only=True)
class StepShares:
    """The shared sequences of a step, in the order in which their ranks meet.

    `unshared_lower_bound_us`: what the step takes at least where none is shared; None where it is not known.
    """

    sequences: tuple[SharedSequence, ...]
    unshared_lower_bound_us: float | None

    def of_rank(self, rank: int) -> StepShares:
        """Keep the sequences that `rank` has a share of; the bound is that of the step."""
        own = [each for each in self.sequences if each.first_rank <= rank < each.first_rank + each.num_ranks]
        return replace(self, sequences=tuple(own))


def shared_rows(frame: pl.DataFrame, table: Chunks, cost: CostModel | None) -> tuple[SharedRow, ...]:
    """Sum up the shared sequences of a plan; `frame` is the `chunk_frame` of `table`."""
    cost_us = pl.col("cost").cast(pl.Float64)
    whole = max(float(frame.select(cost_us.sum()).item()), 1e-30)
    exchange = np.zeros(frame.height) if cost is None else exchange_us(table, cost)
    is_first = pl.col("dp_rank") == pl.col("cp_first_rank")
    sums = (
        frame.with_columns(exchange=pl.Series(exchange))
        .filter(pl.col("cp_size") > 1)
        .group_by("cp_size", "cp_heads")
        .agg(
            num_sequences=(is_first & (pl.col("group_index") == 0)).sum(),
            num_tokens=pl.col("num_tokens").cast(pl.Int64).sum(),
            cost=cost_us.sum(),
            exchange=pl.col("exchange").sum(),
        )
        .sort("cp_size", "cp_heads")
    )
    return tuple(
        SharedRow(
            num_ranks=row["cp_size"],
            num_heads=row["cp_heads"],
            num_sequences=row["num_sequences"],
            num_tokens=row["num_tokens"],
            work_share=row["cost"] / whole,
            exchange_share=None if cost is None else row["exchange"] / max(row["cost"], 1e-30),
        )
        for row in sums.to_dicts()
    )


def step_shares(plan: Plan, step: PlanStep) -> StepShares:
    """Return the sequences that the ranks of `step` share."""
    try:
        cost = plan.cost
    except DataError:
        cost = None
    found: dict[int, SharedSequence] = {}
    for rows in step.chunks.values():
        exchange = exchange_us(chunks_of_rows(rows), cost) if cost is not None else np.zeros(len(rows))
        for group in dict.fromkeys(row.group_id for row in rows if row.cp_size > 1):
            own = [place for place, row in enumerate(rows) if row.group_id == group]
            first = rows[own[0]]
            sequence = SharedSequence(
                sequence_id=first.segments[0].sequence_id,
                num_tokens=sum(rows[place].cp_tokens for place in own),
                first_rank=first.cp_first_rank,
                num_ranks=first.cp_size,
                num_heads=first.cp_heads,
                num_chunks=len(own),
                predicted_us=sum(rows[place].cost for place in own),
                exchange_us=None if cost is None else float(sum(exchange[place] for place in own)),
            )
            assert group is not None
            if group not in found or sequence.predicted_us > found[group].predicted_us:
                found[group] = sequence
    sequences = tuple(found[group] for group in sorted(found))
    bound = None
    if cost is not None and sequences:
        tokens = np.array([sequence.num_tokens for sequence in sequences])
        bound = max(step.lower_bound_us, float(alone_us(cost, tokens, plan.config.pp).max()))
    return StepShares(sequences=sequences, unshared_lower_bound_us=bound)


def exchange_us(chunks: Chunks, cost: CostModel) -> Float64Array:
    """Share of each chunk's cost that is exchange with other ranks, in microseconds, [n]."""
    found = exchange_of(chunks, cost)
    if found is None:
        return np.zeros(chunks.num_tokens.size)
    again = np.where(chunks.kept_attention != NOT_KEPT, found.by_heads, found.forward)
    forwards = found.forward + np.where(chunks.keeps_activations, 0.0, again)
    exchange: Float64Array = cost.shape.num_layers * (forwards + found.backward) / 1e3
    return exchange
