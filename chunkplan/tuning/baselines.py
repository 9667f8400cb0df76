"""Baselines: common ways to train, timed with the same model and the same simulation, under the same memory."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np

from chunkplan.arrays import Int64Array, offsets_of
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.checkpointing import CHECKPOINTINGS, Checkpointing, shown_levels
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
from chunkplan.schedule.forwards import extra_forwards, forwards_ns
from chunkplan.schedule.slots import slot_ops_on
from chunkplan.tuning.grid import Progress
from chunkplan.tuning.options import GpuLayout, MemorySaving, TuneOptions
from chunkplan.tuning.sampling import Sample

#: Full activation checkpointing, as it is switched on without a choice of layers.
_FULL: tuple[Checkpointing, ...] = ("full", "offload")

#: Sequences of a padded micro-batch: the fastest number that fits.
_PADDED = (8, 4, 2)

#: How many times the longest sequence micro-batches may be, and the lengths that trainers are given, where these are
#: more; where a ChunkSize may be as much. The fastest that fits counts.
_LARGER, _GIVEN = (2, 4), (4096, 16384)

#: Lengths that sequences are cut to: this and its doubles. Shown are the largest that fits, and the fastest one that
#: loses no more than this share of the tokens.
_FIRST_CUT, _USUAL_LOSS = 1024, 0.03

#: Tokens and attention_pairs of the micro-batches that a rank makes of its sequences of a step, in their order; both
#: [m].
MicroBatches = tuple[Int64Array, Float64Array]

#: They are made of the lengths of these sequences, and of what the model's attention sees.
MakesMicroBatches = Callable[[Int64Array, Sequence[AttentionPattern]], MicroBatches]

#: Those of each group of ranks of each step of a sample: of so many groups, of so many ranks.
DealtMicroBatches = Callable[[int, int], list[MicroBatches]]

#: A rank that no sequence is left for runs an empty micro-batch.
_NOTHING: MicroBatches = (np.zeros(1, np.int64), np.zeros(1))

#: Ranks that share every micro-batch: the fastest number that fits.
_SHARED = (2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Baseline:
    """A conventional way to train, on its fastest layout.

    `key`: one of `BASELINES`, whatever its settings; `largest`: tokens of its largest micro-batch; `lost`: the share of
    tokens that it cuts off; `cp`: how many ranks share every micro-batch; `sharding`: what data-parallel ranks share
    besides.
    """

    key: str
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
    tokens_per_second: float = 0.0


@dataclass(frozen=True)
class _Way:
    """A baseline on any layout: see `Baseline`. `micro_batches`: those of a sample.

    `levels`: of activation checkpointing, of which it takes the first that fits. `sharding` is None where it may be any
    that the options allow.
    """

    key: str
    name: str
    micro_batches: DealtMicroBatches
    lost: float = 0.0
    cp: int = 1
    levels: tuple[Checkpointing, ...] = CHECKPOINTINGS
    sharding: Sharding | None = None


def baselines(
    sample: Sample, options: TuneOptions, layouts: Sequence[GpuLayout], progress: Progress
) -> Iterator[Baseline]:
    """Time the baselines, one after the other, each on the best of `layouts`: 1F1B, sequences dealt out in the order of
    the data, and packed or padded by each group of ranks for itself.

    Each runs with the first level of activation checkpointing that fits, in as few layers as possible, and with its
    fastest sharding; if nothing fits, its time is that on larger GPUs.
    """
    longest = int(sample.num_tokens.max())
    groups = [*_whole_ways(sample, options, layouts)]
    cuts = [_FIRST_CUT << power for power in range(longest.bit_length()) if _FIRST_CUT << power < longest]
    num_rows = len(groups) + len(cuts)
    for done, group in enumerate(groups, 1):
        row = _fastest(_run(way, sample, options, layout) for way, layout in group)
        progress("baselines", done, num_rows)
        yield row
    fitting = []
    for done, capacity in enumerate(cuts, len(groups) + 1):
        cut = _cut(capacity, sample, options)
        row = _fastest(_run(cut, sample, options, layout) for layout in layouts)
        progress("baselines", done, num_rows)
        fitting += [row] if row.fits else []
    if fitting:
        yield fitting[-1]
        usual = min((row for row in fitting if row.lost <= _USUAL_LOSS), key=lambda row: row.step_ns, default=None)
        if usual not in (None, fitting[-1]):
            yield usual


def _fastest(rows: Iterable[Baseline]) -> Baseline:
    """The fastest that fits, or what takes least memory where none does."""
    return min(rows, key=lambda row: (not row.fits, row.step_ns if row.fits else row.memory.total))


def _whole_ways(
    sample: Sample, options: TuneOptions, layouts: Sequence[GpuLayout]
) -> Iterator[list[tuple[_Way, GpuLayout]]]:
    """List the ways that keep whole sequences: of each row its settings, each with a layout that it can be on."""
    longest = int(sample.num_tokens.max())
    single = [_Way("single", "one sequence a micro-batch", _dealt(_padded(1), sample, options))]
    padded = [
        _Way("padded", f"{size} sequences padded to the longest", _dealt(_padded(size), sample, options))
        for size in _PADDED
    ]
    sizes = {longest * times: f"{times} times the longest" for times in _LARGER}
    sizes |= {size: f"{size:,} tokens" for size in _GIVEN if size > longest * _LARGER[-1]}
    sizes = {longest: "the longest"} | {
        size: words for size, words in sizes.items() if size <= max(options.chunk_sizes)
    }
    packed = [
        _Way("packed", f"packed to {words}", _dealt(_packed(size), sample, options)) for size, words in sizes.items()
    ]
    zero_3 = [
        replace(way, key="zero-3", name="packed, ZeRO-3, full checkpointing", levels=_FULL, sharding="weights")
        for way in packed
    ]
    plain, parallel = ([each for each in layouts if (each.tp > 1) == is_parallel] for is_parallel in (False, True))
    data_parallel = [each for each in plain if each.pp == 1 and each.dp > 1]
    groups = [list(product(single, layouts)), list(product(padded, layouts)), list(product(packed, plain))]
    groups.append(list(product(zero_3, data_parallel)))
    for key, ranks, which in (("context-parallel", _SHARED, plain), ("megatron", (1, *_SHARED), parallel)):
        groups.append(
            [
                (_shared(key, way, cp, layout.tp), layout)
                for way, cp, layout in product(packed, ranks, which)
                if layout.dp % cp == 0
            ]
        )
    yield from filter(None, groups)


def _shared(key: str, way: _Way, cp: int, tp: int) -> _Way:
    """`way` with every micro-batch shared by `cp` ranks, and every layer by `tp` GPUs."""
    tensor = [f"tensor{' parallel' if cp == 1 else ''} ({tp})"] if tp > 1 else []
    words = ", ".join([*tensor, *([f"context parallel ({cp})"] if cp > 1 else [])])
    return replace(way, key=key, name=f"{way.name.replace(' to the longest', '')} + {words}", cp=cp)


def _cut(capacity: int, sample: Sample, options: TuneOptions) -> _Way:
    """Sequences that are cut to `capacity` tokens, and packed."""
    tokens = sample.num_tokens.astype(np.float64)
    lost = np.add.reduceat(np.maximum(tokens - capacity, 0), sample.first_of_step[:-1])
    share = float(sample.weights @ lost) / sample.tokens_per_step
    return _Way("cut", f"cut to {capacity:,} and packed", _dealt(_packed(capacity), sample, options), lost=share)


def _dealt(make: MakesMicroBatches, sample: Sample, options: TuneOptions) -> DealtMicroBatches:
    """Micro-batches as data-parallel loaders deal them: each group takes its sequences in turn, and makes its own.

    Ranks that share micro-batches have two slices of each sequence, early and late, as these have equal work: so
    sequences are padded to equal slices.
    """
    num_tokens, patterns = sample.num_tokens.astype(np.int64), options.shape.attention_patterns

    @cache
    def deal(num_groups: int, cp: int) -> list[MicroBatches]:
        slices = 2 * cp if cp > 1 else 1
        padded = -(-num_tokens // slices) * slices
        shares = [
            padded[start + group : stop : num_groups]
            for start, stop in itertools.pairwise(sample.first_of_step)
            for group in range(num_groups)
        ]
        return [make(share, patterns) if share.size else _NOTHING for share in shares]

    return deal


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


def _run(way: _Way, sample: Sample, options: TuneOptions, layout: GpuLayout) -> Baseline:
    """Take the time and memory of a baseline, with the sharding that is fastest.

    Each sharding has the first level of activation checkpointing that fits, mixed with the level before as far as there
    is room. If none fits, the one with least memory is taken.
    """
    dealt = way.micro_batches(layout.dp // way.cp, way.cp)
    largest = max(int(tokens.max()) for tokens, _ in dealt)
    config = options.plan_config(layout, -(-largest // way.cp), 1, "algorithm2" if layout.pp == 1 else "1f1b")
    layers = config.layers(options.shape.num_layers)
    rows: list[Baseline] = []
    moments: Int64Array | None = None  # what stages hold: 1F1B has the same order whatever actions take

    def run(cost: CostModel) -> tuple[Baseline, Int64Array]:
        step_ns, moments = _simulate(dealt, sample, config, cost, way.cp)
        step_ns += reduction_ns(cost, dp=layout.dp, pp=layout.pp, layers=layers)
        needed = max(memory_of_stages(config, cost, moments), key=lambda stage: stage.total)
        row = Baseline(
            way.key,
            way.name,
            layout,
            step_ns,
            needed,
            str(cost.checkpointing),
            needed.total <= options.gpu_memory,
            largest,
            way.lost,
            way.cp,
            cost.sharding,
            sample.tokens_per_step * (1 - way.lost) / (step_ns / 1e9),
        )
        rows.append(row)
        return row, moments

    for sharding in options.shardings_of(layout) if way.sharding is None else (way.sharding,):
        for place, level in enumerate(way.levels):
            cost = options.cost(layout, MemorySaving(level, False), sharding)
            if moments is not None and level != way.levels[-1] and not _fits(config, cost, moments, options):
                continue
            row, moments = run(cost)
            if row.fits:
                if place and way.levels is CHECKPOINTINGS:
                    fewest = _fewest_layers(way.levels[place - 1 : place + 1], config, cost, moments)
                    if fewest != level:
                        run(replace(cost, checkpointing=fewest))
                break
    return _fastest(rows)


def _fewest_layers(levels: Sequence[Checkpointing], config: PlanConfig, cost: CostModel, moments: Int64Array) -> str:
    """The stronger of two levels in the first layers of each stage, as few as fit, and the weaker in the others.

    The stronger fits in all of them. `moments`: what stages hold, which does not depend on levels.
    """
    weaker, stronger = levels
    layers = config.layers(cost.shape.num_layers)

    def with_first(count: int) -> str:
        return shown_levels([stronger if place < count else weaker for of_stage in layers for place in range(of_stage)])

    def fits(count: int) -> bool:
        mixed = replace(cost, checkpointing=with_first(count))
        return max(stage.total for stage in memory_of_stages(config, mixed, moments)) <= cost.hardware.memory_bytes

    return with_first(1 + bisect_left(range(1, max(layers)), True, key=fits))


def _fits(config: PlanConfig, cost: CostModel, moments: Int64Array, options: TuneOptions) -> bool:
    """True if stages that hold `moments` int64 [pp, 8] fit the memory of a GPU."""
    return max(stage.total for stage in memory_of_stages(config, cost, moments)) <= options.gpu_memory


def _simulate(
    dealt: list[MicroBatches], sample: Sample, config: PlanConfig, cost: CostModel, cp: int
) -> tuple[float, Int64Array]:
    """Return the mean time of a step in nanoseconds, and what each stage holds at its fullest moment, int64 [pp, 8].

    Groups of `cp` ranks share every micro-batch evenly: one rank of each is simulated.
    """
    num_groups = config.dp // cp
    tokens, attention_pairs = (np.concatenate(column) for column in zip(*dealt, strict=True))
    exchange = None
    if cp > 1:  # by heads as far as these go, else by pages
        heads = math.gcd(cp, cost.shape.num_kv_heads // cost.tp)
        ones = np.ones_like(tokens)
        pages = 0 * ones, ones, cp * ones, heads * ones
        exchange = exchange_times(cost, tokens, *pages, attention_pairs=attention_pairs)
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
    step_ns = group_end.reshape(-1, num_groups).max(axis=1)
    if number := extra_forwards(config.loss, cost, has_reference=sample.has_reference):
        of_groups = chunks, scheduled.actions, times, num_groups, config.pp, config.placement, slot_ops, scheduled.slots
        step_ns = step_ns + number * forwards_ns(*of_groups)
    return float(sample.weights @ step_ns), moments
