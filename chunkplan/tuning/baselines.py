"""Baselines: common ways to train, timed with the same model and the same simulation, under the same memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from chunkplan.arrays import Int64Array, offsets_of
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import Float64Array, attention_pairs_of, chunk_times
from chunkplan.cost.exchange import exchange_times
from chunkplan.cost.memory import StageMemory
from chunkplan.cost.model import CostModel, Sharding
from chunkplan.cost.shape import AttentionPattern
from chunkplan.cost.states import reduction_ns
from chunkplan.cost.token_bytes import ResidentTokens
from chunkplan.packing import pack_lengths
from chunkplan.planfile.chunks import chunks_without_segments
from chunkplan.planning.memory import memory_of_stages
from chunkplan.schedule.families import schedule_ranks
from chunkplan.schedule.slots import slot_ops_on
from chunkplan.tuning.grid import Progress
from chunkplan.tuning.options import LADDER, GpuLayout, TuneOptions
from chunkplan.tuning.sampling import Sample

#: Sequences of a padded micro-batch: the fastest number that fits.
_PADDED = (8, 4, 2)

#: How many times the longest sequence micro-batches may be, where a ChunkSize may be as much: the fastest that fits.
_LARGER = (2, 4)

#: Lengths that sequences are cut to: this and its doubles. Shown are the largest that fits, and the fastest one that
#: loses no more than this share of the tokens.
_FIRST_CUT, _USUAL_LOSS = 1024, 0.03

#: Tokens and attention_pairs of the micro-batches that the sequences of a step make, in their order; both [m].
MicroBatches = tuple[Int64Array, Float64Array]

#: They are made of the lengths of a step's sequences, and of what the model's attention sees.
MakesMicroBatches = Callable[[Int64Array, Sequence[AttentionPattern]], MicroBatches]

#: A rank that no micro-batch is left for runs an empty one.
_NOTHING: MicroBatches = (np.zeros(1, np.int64), np.zeros(1))

#: Ranks that share every micro-batch: the fastest number that fits.
_SHARED = (2, 4, 8)


@dataclass(frozen=True)
class Baseline:
    """A way to train, on the layout that it is fastest on.

    `largest`: tokens of its largest micro-batch; `lost`: the share of tokens that it cuts off; `cp`: how many ranks
    share every micro-batch; `sharding`: what data-parallel ranks share besides.
    """

    name: str
    layout: GpuLayout
    step_ns: float
    memory: StageMemory
    checkpointing: str
    fits: bool
    largest: int
    lost: float = 0.0
    cp: int = 1
    sharding: Sharding = "optimizer"


def baselines(sample: Sample, options: TuneOptions, layouts: Sequence[GpuLayout], progress: Progress) -> list[Baseline]:
    """Time the baselines, each on the best of `layouts`: 1F1B, micro-batches dealt out in the order of the data.

    Each runs with the first level of activation checkpointing that fits, and shares what makes it fastest; where
    nothing helps, its time is what it would take on larger GPUs.
    """
    longest = int(sample.num_tokens.max())
    cuts = [_FIRST_CUT << power for power in range(longest.bit_length()) if _FIRST_CUT << power < longest]
    sharing = [(cp, layout) for cp in _SHARED for layout in layouts if layout.dp % cp == 0]
    kinds = {is_parallel: [each for each in layouts if (each.tp > 1) == is_parallel] for is_parallel in (False, True)}
    num_rows = 2 + sum(map(bool, kinds.values())) + bool(sharing) + len(cuts)
    done = itertools.count(1)

    def best(rows: Iterable[Baseline]) -> Baseline:
        found = min(rows, key=lambda row: (not row.fits, row.step_ns if row.fits else row.memory.total))
        progress("baselines", next(done), num_rows)
        return found

    rows = [best(_run("one sequence a micro-batch", _padded(1), sample, options, layout) for layout in layouts)]
    rows.append(
        best(
            _run(f"{size} sequences padded to the longest", _padded(size), sample, options, layout)
            for size in _PADDED
            for layout in layouts
        )
    )
    sizes = [longest] + [longest * times for times in _LARGER if longest * times <= max(options.chunk_sizes)]
    words = {size: "the longest" if size == longest else f"{size // longest} times the longest" for size in sizes}
    for name, is_parallel in (("packed to {}", False), ("packed, tensor parallelism", True)):
        packed = (
            _run(name.format(words[size]), _packed(size), sample, options, layout)
            for size in sizes
            for layout in kinds[is_parallel]
        )
        rows += [best(packed)] if kinds[is_parallel] else []
    shared = [
        _run(f"packed, shared by {cp} ranks", _packed(size), sample, options, layout, cp)
        for cp, layout in sharing
        for size in sizes
    ]
    rows += [best(shared)] if shared else []
    found = (best(_cut(capacity, sample, options, layout) for layout in layouts) for capacity in cuts)
    fitting = [row for row in found if row.fits]
    if fitting:
        usual = min((row for row in fitting if row.lost <= _USUAL_LOSS), key=lambda row: row.step_ns, default=None)
        rows += [fitting[-1]] + ([usual] if usual not in (None, fitting[-1]) else [])
    return rows


def _cut(capacity: int, sample: Sample, options: TuneOptions, layout: GpuLayout) -> Baseline:
    """Time sequences that are cut to `capacity` tokens, and packed."""
    tokens = sample.num_tokens.astype(np.float64)
    lost = np.add.reduceat(np.maximum(tokens - capacity, 0), sample.first_of_step[:-1])
    row = _run(f"cut to {capacity:,} and packed", _packed(capacity), sample, options, layout)
    return replace(row, lost=float(sample.weights @ lost) / sample.tokens_per_step)


def _padded(size: int) -> MakesMicroBatches:
    def pad(num_tokens: Int64Array, patterns: Sequence[AttentionPattern]) -> MicroBatches:
        starts = np.arange(0, num_tokens.size, size)
        rows: Int64Array = np.diff(np.append(starts, num_tokens.size)).astype(np.int64)
        longest: Int64Array = np.maximum.reduceat(num_tokens, starts)
        return rows * longest, rows * attention_pairs_of(longest, 0 * longest, patterns)

    return pad


def _packed(capacity: int) -> MakesMicroBatches:
    def pack(num_tokens: Int64Array, patterns: Sequence[AttentionPattern]) -> MicroBatches:
        kept = np.minimum(num_tokens, capacity)
        packing = pack_lengths(kept, capacity, "bfd", certify=False)
        pairs = np.bincount(packing.bin_of, weights=attention_pairs_of(kept, 0 * kept, patterns)).astype(np.float64)
        return np.bincount(packing.bin_of, weights=kept).astype(np.int64), pairs

    return pack


def _run(
    name: str, make: MakesMicroBatches, sample: Sample, options: TuneOptions, layout: GpuLayout, cp: int = 1
) -> Baseline:
    """Take the time and memory of a baseline, with the sharding that is fastest.

    Each sharding has the first level of activation checkpointing that fits. Where none does, what needs least memory is
    taken.
    """
    edges = itertools.pairwise(sample.first_of_step)
    patterns = options.shape.attention_patterns
    steps = [make(sample.num_tokens[start:stop].astype(np.int64), patterns) for start, stop in edges]
    largest = max(int(tokens.max()) for tokens, _ in steps)
    config = options.plan_config(layout, -(-largest // cp), 1, "algorithm2" if layout.pp == 1 else "1f1b")
    layers = config.layers(options.shape.num_layers)
    rows: list[Baseline] = []
    moments: Int64Array | None = None  # what stages hold: 1F1B has the same order whatever actions take
    for sharding in options.shardings_of(layout):
        for memory in LADDER[::2]:
            cost = options.cost(layout, memory, sharding)
            if moments is not None and memory != LADDER[::2][-1] and not _fits(config, cost, moments, options):
                continue
            step_ns, moments = _simulate(steps, sample.weights, config, cost, cp)
            step_ns += reduction_ns(cost, dp=layout.dp, pp=layout.pp, layers=layers)
            needed = max(memory_of_stages(config, cost, moments), key=lambda stage: stage.total)
            fits = needed.total <= options.gpu_memory
            row = Baseline(name, layout, step_ns, needed, memory.checkpointing, fits, largest, cp=cp, sharding=sharding)
            rows.append(row)
            if fits:
                break
    return min(rows, key=lambda row: (not row.fits, row.step_ns if row.fits else row.memory.total))


def _fits(config: PlanConfig, cost: CostModel, moments: Int64Array, options: TuneOptions) -> bool:
    """True if stages that hold `moments` int64 [pp, 8] fit the memory of a GPU."""
    return max(stage.total for stage in memory_of_stages(config, cost, moments)) <= options.gpu_memory


def _simulate(
    steps: list[MicroBatches], weights: Float64Array, config: PlanConfig, cost: CostModel, cp: int
) -> tuple[float, Int64Array]:
    """Return the mean time of a step in nanoseconds, and what each stage holds at its fullest moment, int64 [pp, 8].

    Groups of `cp` ranks share every micro-batch evenly: one rank of each is simulated.
    """
    num_groups = config.dp // cp
    dealt = [
        (tokens[group::num_groups], attention_pairs[group::num_groups]) if group < tokens.size else _NOTHING
        for tokens, attention_pairs in steps
        for group in range(num_groups)
    ]
    tokens, attention_pairs = (np.concatenate(column) for column in zip(*dealt, strict=True))
    exchange = None
    if cp > 1:  # by heads as far as these go, else by pages
        heads = math.gcd(cp, cost.shape.num_kv_heads // cost.tp)
        ones = np.ones_like(tokens)
        exchange = exchange_times(cost, tokens, 0 * ones, ones, cp * ones, heads * ones)
    tokens, attention_pairs = -(-tokens // cp), attention_pairs / cp
    chunks = chunks_without_segments(offsets_of([tokens.size for tokens, _ in dealt]), tokens)
    times = chunk_times(
        tokens, attention_pairs, cost.rates_on(config.dp), config.layers(cost.shape.num_layers), exchange
    )
    slot_ops = slot_ops_on(cost, config.dp)
    scheduled = schedule_ranks(chunks, times, config.pp, config.schedule, None, str, num_groups, slot_ops=slot_ops)
    group_end = scheduled.stage_end.reshape(-1, config.pp).max(axis=1)
    retained = scheduled.peak_retained_tokens.reshape(-1, config.pp).max(axis=0)
    moments = np.stack([retained, *[0 * retained] * (len(ResidentTokens._fields) - 1)], axis=1)
    return float(weights @ group_end.reshape(-1, num_groups).max(axis=1)), moments
