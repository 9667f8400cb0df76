"""Batches -> ranks -> chunks -> order -> predictions: the whole planner, as pure functions over arrays.

The same lengths, targets and configuration give the same tables on any machine: shuffles come from the raw stream of a
bit generator, costs are whole nanoseconds, ties are broken by position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.balance import spread
from chunkplan.chunks import RankChunks, make_chunks
from chunkplan.cost.flops import BACKWARD, CostModel
from chunkplan.errors import UsageError
from chunkplan.packing.bounds import lower_bound
from chunkplan.plan_tables import PlanTables
from chunkplan.planfile.manifest_entries import MAX_DP, MAX_PP
from chunkplan.schedule import make_schedule
from chunkplan.schedule.simulate import simulate

#: Given a sequence_id and the starts and ends of its parts, int32 [n]: the predictions made in each part, int32 [n].
CountTargets = Callable[[int, Int32Array, Int32Array], Int32Array]


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What a plan is built with.

    `chunk_size` tokens at most in a chunk; at most `k` chunks of a group hold activations; `global_batch` sequences a
    step; `epochs` passes over the data; a short last batch of an epoch is kept or dropped; `dp` data-parallel ranks of
    `pp` pipeline stages each; `seed` of the shuffle.

    Raises:
        UsageError: a value is out of range.
    """

    chunk_size: int
    k: int
    global_batch: int = 256
    epochs: int = 1
    last_batch: Literal["keep", "drop"] = "keep"
    dp: int = 1
    pp: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("chunk_size", "k", "global_batch", "epochs", "dp", "pp", "seed"):
            value = getattr(self, name)
            least, most = int(name != "seed"), {"dp": MAX_DP, "pp": MAX_PP}.get(name, 2**31 - 1)
            if type(value) is not int or not least <= value <= most:
                raise UsageError(
                    f"{name.replace('_', '-')} is {value!r}, expected a whole number from {least} to {most}",
                    hint="for example: chunkplan build --chunk-size 8192 --k 4",
                )
        if self.last_batch not in ("keep", "drop"):
            raise UsageError(f"last-batch is {self.last_batch!r}", hint="it is keep or drop")


def plan_steps(
    num_tokens: Int32Array,
    num_target_tokens: Int32Array,
    count_targets: CountTargets,
    config: PlanConfig,
    cost: CostModel,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, pa.Table]:
    """Plan a dataset: tables `steps`, `chunks` and `schedule` of the contract.

    Args:
        num_tokens, num_target_tokens: of every sequence, int32 [n].
        count_targets: asked for the sequences that are split.
        progress: called with (steps planned, steps).
    """
    tables = PlanTables()
    num_steps = count_steps(len(num_tokens), config)
    for step, epoch, sequence_ids in batches(len(num_tokens), config):
        lengths = num_tokens[sequence_ids]
        rank_of = spread(sequence_costs(lengths, config, cost), config.dp)
        necessary_ns = 0
        makespans = []
        num_chunks = 0
        for dp_rank in range(config.dp):
            mine = sequence_ids[rank_of == dp_rank]
            chunks = make_chunks(num_tokens[mine], config.chunk_size, config.k)
            forward_ns = chunks.sum_segments(
                cost.forward_ns(chunks.segment_end - chunks.segment_start, chunks.segment_start)
            )
            cost_ns = forward_ns * (1 + BACKWARD + ~chunks.keeps_activations)
            schedule = make_schedule(chunks.states, config.pp)
            simulation = simulate(schedule, forward_ns // config.pp)
            tables.add_rank(
                step=step,
                dp_rank=dp_rank,
                chunks=chunks,
                sequence_ids=mine,
                segment_targets=_segment_targets(chunks, mine, num_target_tokens, count_targets),
                cost_ns=cost_ns,
                schedule=schedule,
                stage_end_ns=simulation.stage_end,
            )
            necessary_ns += int(forward_ns.sum()) * (1 + BACKWARD)
            makespans.append(simulation.makespan)
            num_chunks += chunks.num_chunks
        bound = max(config.dp, _chunks_lower_bound(lengths, config.chunk_size))
        tables.add_step(
            step=step,
            epoch=epoch,
            num_sequences=len(sequence_ids),
            num_tokens=int(lengths.sum(dtype=np.int64)),
            num_target_tokens=int(num_target_tokens[sequence_ids].sum(dtype=np.int64)),
            num_chunks=num_chunks,
            chunks_lower_bound=bound,
            optimal=num_chunks == bound,
            predicted_us=max(makespans) / 1e3,
            lower_bound_us=necessary_ns / (config.dp * config.pp) / 1e3,
        )
        if progress is not None:
            progress(step + 1, num_steps)
    return tables.finish()


def batches(num_sequences: int, config: PlanConfig) -> Iterator[tuple[int, int, Int64Array]]:
    """(step, epoch, sequence_ids) of every global batch. A step never spans two epochs."""
    step = 0
    for epoch in range(config.epochs):
        order = epoch_order(num_sequences, config.seed, epoch)
        for start in range(0, num_sequences, config.global_batch):
            batch = order[start : start + config.global_batch]
            if len(batch) == config.global_batch or config.last_batch == "keep":
                yield step, epoch, batch
                step += 1


def count_steps(num_sequences: int, config: PlanConfig) -> int:
    """How many steps `batches` makes."""
    full, rest = divmod(num_sequences, config.global_batch)
    return config.epochs * (full + (rest > 0 and config.last_batch == "keep"))


def epoch_order(num_sequences: int, seed: int, epoch: int) -> Int64Array:
    """A shuffle of 0..n-1 of its own for every (seed, epoch).

    Sorts by keys of PCG64's raw stream, which numpy keeps stable between versions as it does not `permutation`.
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_sequences)
    return np.argsort(keys, kind="stable")


def sequence_costs(lengths: Int32Array, config: PlanConfig, cost: CostModel) -> Int64Array:
    """Forward, backward and the recompute of all but the last K parts, in ns."""
    num_parts = -(-lengths.astype(np.int64) // config.chunk_size)
    recomputed = np.maximum(0, num_parts - config.k) * config.chunk_size
    nothing = np.zeros_like(recomputed)
    return (1 + BACKWARD) * cost.forward_ns(lengths, nothing) + cost.forward_ns(recomputed, nothing)


def _segment_targets(
    chunks: RankChunks, sequence_ids: Int64Array, num_target_tokens: Int32Array, count_targets: CountTargets
) -> Int32Array:
    """Predictions made in each segment, int32 [num_segments]."""
    targets: Int32Array = num_target_tokens[sequence_ids[chunks.segment_sequence]].astype(np.int32)
    is_part = chunks.group_id[chunks.segment_chunk] >= 0
    for sequence in np.unique(chunks.segment_sequence[is_part]).tolist():
        parts = np.flatnonzero(is_part & (chunks.segment_sequence == sequence))
        targets[parts] = count_targets(
            int(sequence_ids[sequence]), chunks.segment_start[parts], chunks.segment_end[parts]
        )
    return targets


def _chunks_lower_bound(lengths: Int32Array, chunk_size: int) -> int:
    """No way to cut and pack these sequences with whole chunks for the split ones needs fewer chunks."""
    is_split = lengths > chunk_size
    parts = int((-(-lengths[is_split].astype(np.int64) // chunk_size)).sum())
    return parts + lower_bound(lengths[~is_split], chunk_size)


def count_all_targets(sequence_id: int, start: Int32Array, end: Int32Array) -> Int32Array:
    """`CountTargets` where every token but a sequence's first is a target: each token before the last predicts one."""
    last = end.max()
    counts: Int32Array = np.where(end == last, end - start - 1, end - start)
    return counts


def count_masked_targets(target: BoolArray, start: Int32Array, end: Int32Array) -> Int32Array:
    """Predictions made in parts [start, end) of a sequence with mask `target`: the targets in [start + 1, end + 1)."""
    before = np.concatenate([[0], np.cumsum(target)])  # before[i]: targets among the first i tokens
    counts: Int32Array = (before[np.minimum(end + 1, target.size)] - before[start + 1]).astype(np.int32)
    return counts
