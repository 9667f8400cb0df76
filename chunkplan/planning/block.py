"""Plans some consecutive steps of an epoch: their sequences are split, spread, packed and scheduled."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from chunkplan.arrays import Int32Array, Int64Array, IntArray, offsets_of, sum_runs
from chunkplan.config.plan import KByLength, PlanConfig
from chunkplan.cost.durations import (
    Float64Array,
    durations,
    link_times,
    recompute_ns,
    split_layers,
    squares_of,
    work_ns,
)
from chunkplan.cost.memory import stage_token_bytes
from chunkplan.cost.model import CostModel
from chunkplan.cost.rates import Rates
from chunkplan.operations import OPS
from chunkplan.planning.chunks import Chunks, make_chunks
from chunkplan.planning.improve import pack_better, parts_per_rank, spread_better
from chunkplan.planning.ranks import Placement, Rules, Sequences, place_steps
from chunkplan.planning.splitting import split_sequences
from chunkplan.planning.tables import PlacedSequences, RankTimes, chunks_table, schedule_table, steps_table
from chunkplan.planning.targets import TargetMask, count_part_targets
from chunkplan.schedule.actions import RankChunks
from chunkplan.schedule.families import Scheduled, schedule_ranks
from chunkplan.schedule.footprint import fullest, fullest_moments

#: Sequences and steps of a block, at most, unless a single step has more: (step, tokens, position) of each sequence
#: then fits 63 bits. Larger blocks waste less time between them; small ones do where each step takes long.
BLOCK_SEQUENCES, BLOCK_STEPS = 1 << 18, 1 << 13
SLOW_BLOCK_SEQUENCES = 1 << 12


@dataclass(frozen=True)
class Block:
    """Steps `first_step`.. of an epoch: the sequence ids of all, and how many each has."""

    first_step: int
    epoch: int
    sequence_ids: Int32Array
    sizes: Int64Array


@dataclass(frozen=True)
class Dataset:
    """Tokens and targets of every sequence, int32 [n]; masks, unless every token but a sequence's first is a target."""

    num_tokens: Int32Array
    num_target_tokens: Int32Array
    mask: TargetMask | None


@dataclass(frozen=True)
class Planned:
    """Rows of the tables `steps`, `chunks` and `schedule`, and what each stage holds when it takes most memory in them.

    `moments` int64 [pp, 3]: see `fullest_moments`; `ranks` int64 [pp]: where that is, as step x dp + rank.
    """

    tables: dict[str, pa.Table]
    moments: Int64Array
    ranks: Int64Array


def plan_block(block: Block, dataset: Dataset, config: PlanConfig, cost: CostModel, stop: threading.Event) -> Planned:
    """The rows for the steps of `block`, and their fullest moments.

    Raises:
        CancelledError: `stop` was set while there was still much to do.
        UsageError: a rank cannot be scheduled within `memory_tokens`.
    """
    placed, chunks = chunk_block(block, dataset, config, cost, stop)
    rank_chunks, scheduled = schedule_block(block, chunks, config, cost)
    cost_ns, recompute_ns = chunk_costs(rank_chunks)
    tokens = placed.sequences.tokens
    steps = steps_table(
        block.first_step,
        block.epoch,
        placed,
        target_tokens=dataset.num_target_tokens[placed.ids],
        rank_chunks=chunks.rank_chunks,
        times=RankTimes(
            cost_ns=sum_runs(cost_ns, chunks.rank_chunks),
            end_ns=scheduled.stage_end.reshape(-1, config.pp).max(axis=1),
            retained=scheduled.peak_retained_tokens.reshape(-1, config.pp).max(axis=1),
            recompute_ns=sum_runs(recompute_ns, chunks.rank_chunks),
        ),
        necessary_ns=work_ns(cost, tokens, squares_of(tokens, 0 * tokens)),
        chunk_ns=cost.passes * cost.chunk_overhead_ns,
        pp=config.pp,
    )
    token_bytes = stage_token_bytes(cost, config.pp, config.virtual_stages)
    moments, ranks = fullest(rank_moments(chunks, rank_chunks, scheduled, token_bytes), token_bytes)
    tables = {
        "steps": steps,
        "chunks": chunks_table(block.first_step, config.dp, chunks, cost_ns),
        "schedule": schedule_table(block.first_step, config.dp, config.pp, scheduled.actions, scheduled.stage_end),
    }
    return Planned(tables, moments, block.first_step * config.dp + ranks)


def chunk_block(
    block: Block, dataset: Dataset, config: PlanConfig, cost: CostModel, stop: threading.Event
) -> tuple[PlacedSequences, Chunks]:
    """The sequences of a block, each in its place, and the chunks that they make."""
    first = offsets_of(block.sizes)
    ids, tokens = _longest_first(block, dataset.num_tokens)
    sequences = _split(tokens, config, cost)
    rules = Rules(
        dp=config.dp,
        chunk_size=config.chunk_size,
        chunk_ns=cost.passes * cost.chunk_overhead_ns,
        passes=cost.passes,
        tail_sharing=config.tail_sharing,
    )
    placement = place_steps(first, sequences, rules)
    if config.balance == "search":
        spread_better(first, sequences, rules, placement, stop, equal_chunks=config.equal_chunks)
    if config.packing != "bfd":
        pack_better(first, sequences, rules, placement, stop, config.packing)
    if config.equal_chunks:
        _fill_up(first, sequences, placement)

    chunks = make_chunks(first, sequences, placement, ids, dataset.num_target_tokens[ids])
    _add_parts(chunks, sequences, ids, dataset.mask)
    return PlacedSequences(first, ids, sequences, placement), chunks


def schedule_block(block: Block, chunks: Chunks, config: PlanConfig, cost: CostModel) -> tuple[RankChunks, Scheduled]:
    """The chunks of all ranks of a block as schedules see them, and what their stages do."""
    layers = split_layers(cost.shape.num_layers, config.pp * config.virtual_stages)
    ranks = timed_chunks(chunks, cost.rates, layers)

    def place(index: int) -> str:
        step, rank = divmod(index, config.dp)
        return f"step {block.first_step + step}, rank {rank}"

    return ranks, schedule_ranks(chunks.rank_chunks, ranks, config.pp, config.schedule, config.memory_tokens, place)


def rank_moments(chunks: Chunks, ranks: RankChunks, scheduled: Scheduled, token_bytes: Float64Array) -> Int64Array:
    """The fullest moment of each stage of all ranks of a block, int64 [num_ranks, pp, 3]: see `fullest_moments`."""
    pp = token_bytes.shape[0]
    return fullest_moments(scheduled.actions, chunks.rank_chunks, ranks.group_id, ranks.num_tokens, pp, token_bytes)


def timed_chunks(chunks: Chunks, rates: Rates, layers: Sequence[int]) -> RankChunks:
    """The chunks of all ranks as schedules see them; `layers` of each model part."""
    return RankChunks(
        chunks.group_id,
        chunks.keeps_activations,
        chunks.num_tokens.astype(np.int64),
        durations(chunks.num_tokens, chunks.squares, rates, layers),
        link_times(chunks.num_tokens, rates),
    )


def chunk_costs(ranks: RankChunks) -> tuple[Int64Array, Int64Array]:
    """Time of everything done with each chunk on all model parts, and of what of it is done twice; int64 [n] each."""
    by_op = dict(zip(OPS, ranks.durations.sum(axis=1), strict=True))
    twice = np.where(ranks.keeps, 0, by_op["forward_kv"])
    return by_op["forward"] + by_op["backward"] + twice, twice


def _longest_first(block: Block, num_tokens: Int32Array) -> tuple[Int32Array, Int64Array]:
    """The sequence ids of a block and their tokens, those of each step descending; equal ones stay in order.

    Sorts (step, -tokens, position) packed into one integer, which is several times faster than an indirect sort.
    """
    num_bits = int(block.sequence_ids.size).bit_length()
    longest = np.iinfo(np.int32).max
    step = np.repeat(np.arange(block.sizes.size), block.sizes)
    keys = (step << 31) + (longest - num_tokens[block.sequence_ids])
    keys = (keys << num_bits) + np.arange(block.sequence_ids.size)
    keys.sort()
    ids: Int32Array = block.sequence_ids[keys & ((1 << num_bits) - 1)]
    tokens: Int64Array = longest - ((keys >> num_bits) & longest)
    return ids, tokens


def _split(tokens: Int64Array, config: PlanConfig, cost: CostModel) -> Sequences:
    """Cut what is longer than ChunkSize, and say what each sequence [n] costs."""
    work = work_ns(cost, tokens, squares_of(tokens, 0 * tokens))
    split = np.flatnonzero(tokens > config.chunk_size)
    num_parts, ends = split_sequences(tokens[split], config.chunk_size, config.split, cost)
    first = np.cumsum(num_parts) - num_parts
    index = np.arange(ends.size) - np.repeat(first, num_parts)
    starts = np.where(index == 0, 0, np.concatenate([[0], ends[:-1]]))
    k = _most_kept(tokens[split], config.k, config.k_by_length)
    keeps = index >= np.repeat(num_parts - k, num_parts)
    part_tokens = ends - starts
    part_ns = work_ns(cost, part_tokens, squares_of(part_tokens, starts)) + cost.passes * cost.chunk_overhead_ns
    part_ns[~keeps] += recompute_ns(cost, part_tokens[~keeps], starts[~keeps]) + cost.chunk_overhead_ns
    work[split] = sum_runs(part_ns, offsets_of(num_parts))
    parts = np.zeros(tokens.size + 1, np.int64)
    parts[split + 1] = num_parts
    return Sequences(tokens=tokens, work=work, parts=np.cumsum(parts), part_tokens=part_tokens, part_keeps=keeps)


def _fill_up(first: Int64Array, sequences: Sequences, placement: Placement) -> None:
    """Give every rank of a step as many chunks as the one that has most, by zero-loss chunks; bounds follow."""
    num_chunks = placement.num_standalone + parts_per_rank(first, sequences, placement)
    placement.num_standalone[:] += num_chunks.max(axis=1, keepdims=True) - num_chunks
    placement.rank_bound[:] = placement.rank_bound.max(axis=1, keepdims=True)
    dp = placement.num_standalone.shape[1]
    placement.step_bound[:] = -(-placement.step_bound // dp) * dp


def _add_parts(chunks: Chunks, sequences: Sequences, ids: Int32Array, mask: TargetMask | None) -> None:
    """Add to each chunk the squares and the targets of the part in it."""
    sequence = np.repeat(np.arange(ids.size), np.diff(sequences.parts))
    start = chunks.prefix_tokens[chunks.part_chunk].astype(np.int64)
    chunks.squares[chunks.part_chunk] += squares_of(sequences.part_tokens, start)
    chunks.num_target_tokens[chunks.part_chunk] += count_part_targets(
        ids[sequence], start, start + sequences.part_tokens, sequences.tokens[sequence], mask
    ).astype(np.int32)


def _most_kept(num_tokens: IntArray, k: int, k_by_length: KByLength | None) -> Int64Array:
    """K of sequences of `num_tokens` [n]: `k`, or that of the last of `k_by_length` whose length they exceed.

    `k_by_length` has pairs (tokens, K), ascending by tokens: sequences of more than that many tokens.
    """
    lengths = np.array([tokens for tokens, _ in k_by_length or ()], np.int64)
    values = np.array([k, *(longer for _, longer in k_by_length or ())], np.int64)
    return values[np.searchsorted(lengths, num_tokens, side="left")]
