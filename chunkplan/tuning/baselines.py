"""What people run today, timed with the same model and the same simulation, under the same memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.cost.durations import Float64Array, durations, link_times, split_layers
from chunkplan.cost.memory import StageMemory
from chunkplan.cost.model import CostModel
from chunkplan.packing import pack_lengths
from chunkplan.planning.config import PlanConfig
from chunkplan.schedule.actions import RankChunks
from chunkplan.schedule.families import schedule_ranks
from chunkplan.tuning.options import LADDER, Layout, TuneOptions
from chunkplan.tuning.sampling import Sample
from chunkplan.tuning.trial import memory_of_stages

#: Sequences of a padded micro-batch, the largest number that fits.
_PADDED = (8, 4, 2)

#: Tokens and squares of the micro-batches that the sequences of a step make, in their order; both [m].
MicroBatches = tuple[Int64Array, Float64Array]

#: A rank that no micro-batch is left for runs an empty one.
_NOTHING: MicroBatches = (np.zeros(1, np.int64), np.zeros(1))


@dataclass(frozen=True)
class Baseline:
    """A way to train: `largest`, tokens of its largest micro-batch; `lost`, share of tokens that are cut off."""

    name: str
    step_ns: float
    memory: StageMemory
    checkpointing: str
    fits: bool
    largest: int
    lost: float = 0.0


def baselines(sample: Sample, options: TuneOptions, layout: Layout) -> list[Baseline]:
    """What people run today on this layout: plain 1F1B, micro-batches dealt out to ranks in the order of the data.

    Each with full checkpointing where it does not fit without; where it does not fit with it either, its time is what
    it would take on larger GPUs.
    """
    longest = int(sample.num_tokens.max())
    rows = [_run("one sequence a micro-batch", _one, sample, options, layout)]
    padded = [
        _run(f"{size} sequences padded to the longest", _padded(size), sample, options, layout) for size in _PADDED
    ]
    rows.append(next((row for row in padded if row.fits), padded[-1]))
    rows.append(_run("packed to the longest", _packed(longest), sample, options, layout))
    capacity = 1 << (longest - 1).bit_length() - 1
    while capacity >= 1024:
        row = _run(f"cut to {capacity:,} and packed", _packed(capacity), sample, options, layout)
        if row.fits or capacity == 1024:
            rows.append(row)
            break
        capacity //= 2
    return rows


def _one(num_tokens: Int64Array) -> MicroBatches:
    return num_tokens, num_tokens.astype(np.float64) ** 2


def _padded(size: int) -> Callable[[Int64Array], MicroBatches]:
    def pad(num_tokens: Int64Array) -> MicroBatches:
        starts = np.arange(0, num_tokens.size, size)
        rows: Int64Array = np.diff(np.append(starts, num_tokens.size)).astype(np.int64)
        longest: Int64Array = np.maximum.reduceat(num_tokens, starts)
        squares: Float64Array = rows.astype(np.float64) * longest.astype(np.float64) ** 2
        return rows * longest, squares

    return pad


def _packed(capacity: int) -> Callable[[Int64Array], MicroBatches]:
    def pack(num_tokens: Int64Array) -> MicroBatches:
        kept = np.minimum(num_tokens, capacity)
        packing = pack_lengths(kept, capacity, "bfd", certify=False)
        squares: Float64Array = np.bincount(packing.bin_of, weights=kept.astype(np.float64) ** 2).astype(np.float64)
        return np.bincount(packing.bin_of, weights=kept).astype(np.int64), squares

    return pack


def _run(
    name: str, make: Callable[[Int64Array], MicroBatches], sample: Sample, options: TuneOptions, layout: Layout
) -> Baseline:
    """Time and memory: without checkpointing if that fits, else with."""
    firsts = sample.first_of_step
    steps = [make(sample.num_tokens[first:last].astype(np.int64)) for first, last in itertools.pairwise(firsts)]
    largest = max(int(tokens.max()) for tokens, _ in steps)
    config = options.plan_config(layout, largest, 1, "algorithm2" if layout.pp == 1 else "1f1b")
    trained = sum(weight * tokens.sum() for weight, (tokens, _) in zip(sample.weights, steps, strict=True))
    lost = max(0.0, 1 - float(trained) / sample.tokens_per_step)
    for memory in LADDER:
        if memory.kv_offload:
            continue
        cost = options.cost(layout, memory)
        step_ns, moments = _simulate(steps, sample.weights, config, cost)
        stages = memory_of_stages(config, cost, options.sharding, moments)
        needed = max(stages, key=lambda stage: stage.total)
        row = Baseline(name, step_ns, needed, memory.checkpointing, needed.total <= options.gpu_memory, largest, lost)
        if row.fits:
            break
    return row


def _simulate(
    steps: list[MicroBatches], weights: Float64Array, config: PlanConfig, cost: CostModel
) -> tuple[float, Int64Array]:
    """(Mean time of a step, what each stage holds at its fullest moment, see `fullest_moments`)."""
    dealt = [
        (tokens[rank :: config.dp], squares[rank :: config.dp]) if rank < tokens.size else _NOTHING
        for tokens, squares in steps
        for rank in range(config.dp)
    ]
    rank_chunks = np.concatenate([[0], np.cumsum([tokens.size for tokens, _ in dealt])])
    tokens, squares = (np.concatenate(column) for column in zip(*dealt, strict=True))
    chunks = RankChunks(
        np.full(tokens.size, -1, np.int32),
        np.ones(tokens.size, bool),
        tokens,
        durations(tokens, squares, cost.rates, split_layers(cost.shape.num_layers, config.pp)),
        link_times(tokens, cost.rates),
    )
    assert config.schedule is not None, "PlanConfig resolves it"
    scheduled = schedule_ranks(rank_chunks, chunks, config.pp, config.schedule, None, str)
    rank_end = scheduled.stage_end.reshape(-1, config.pp).max(axis=1)
    retained = scheduled.peak_retained_tokens.reshape(-1, config.pp).max(axis=0)
    moments = np.stack([retained, 0 * retained, 0 * retained], axis=1)
    return float(weights @ rank_end.reshape(-1, config.dp).max(axis=1)), moments
