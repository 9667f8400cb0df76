"""Plans some consecutive steps of an epoch: their sequences are split, assigned to ranks, packed and scheduled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from chunkplan.arrays import Int32Array, Int64Array, IntArray, offsets_of, sum_runs
from chunkplan.config.plan import KByLength, PlanConfig
from chunkplan.cost.durations import attention_pairs_of, chunk_times, recompute_ns, split_layers, work_ns
from chunkplan.cost.memory import stage_token_bytes
from chunkplan.cost.model import CostModel
from chunkplan.operations import OPS
from chunkplan.planfile.chunks import Chunks
from chunkplan.planning.chunks import ChunkedBlock, make_chunks
from chunkplan.planning.ranks import Placement, Rules, Sequences, place_steps
from chunkplan.planning.refine import parts_per_rank, refine_assignment, refine_packing
from chunkplan.planning.splitting import TargetMask, count_part_targets, split_sequences
from chunkplan.planning.tables import RankTimes, chunks_table, schedule_table, steps_table
from chunkplan.schedule.families import Scheduled, schedule_ranks
from chunkplan.schedule.holdings import fullest, fullest_moments

#: Sequences and steps of a block, at most, unless a single step has more: (step, tokens, position) of each sequence
#: then fits 63 bits. Larger blocks waste less time between them; small ones do where each step takes long.
BLOCK_SEQUENCES, BLOCK_STEPS = 1 << 18, 1 << 13
SLOW_BLOCK_SEQUENCES = 1 << 12


@dataclass(frozen=True)
class StepBlock:
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

    `chunks`: those of the table. `moments` int64 [pp, 3]: see `fullest_moments`; `ranks` int64 [pp]: where that is, as
    step x dp + rank.
    """

    tables: dict[str, pa.Table]
    chunks: Chunks
    moments: Int64Array
    ranks: Int64Array


def plan_block(
    block: StepBlock, dataset: Dataset, config: PlanConfig, cost: CostModel, is_cancelled: Callable[[], bool]
) -> Planned:
    """The rows for the steps of `block`, and their fullest moments.

    Raises:
        CancelledError: `is_cancelled()` was true while there was still much to do.
        UsageError: a rank cannot be scheduled within `memory_tokens`.
    """
    chunked = chunk_block(block, dataset, config, cost, is_cancelled)
    scheduled = schedule_block(block, chunked, config)
    tokens, rank_chunks = chunked.sequences.tokens, chunked.chunks.rank_chunks
    steps = steps_table(
        block.first_step,
        block.epoch,
        chunked,
        target_tokens=dataset.num_target_tokens[chunked.ids],
        times=RankTimes(
            cost_ns=sum_runs(chunked.cost_ns, rank_chunks),
            end_ns=scheduled.stage_end.reshape(-1, config.pp).max(axis=1),
            retained=scheduled.peak_retained_tokens.reshape(-1, config.pp).max(axis=1),
            recompute_ns=sum_runs(chunked.recompute_ns, rank_chunks),
        ),
        necessary_ns=work_ns(cost, tokens, attention_pairs_of(tokens, 0 * tokens)),
        chunk_ns=cost.passes * cost.chunk_overhead_ns,
        pp=config.pp,
    )
    token_bytes = stage_token_bytes(cost, config.pp, config.virtual_stages)
    moments, ranks = fullest(fullest_moments(chunked.chunks, scheduled.actions, token_bytes), token_bytes)
    tables = {
        "steps": steps,
        "chunks": chunks_table(block.first_step, config.dp, chunked.chunks),
        "schedule": schedule_table(block.first_step, config.dp, config.pp, scheduled.actions, scheduled.stage_end),
    }
    return Planned(tables, chunked.chunks, moments, block.first_step * config.dp + ranks)


def chunk_block(
    block: StepBlock,
    dataset: Dataset,
    config: PlanConfig,
    cost: CostModel,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> ChunkedBlock:
    """The sequences of a block, each in its place, and the chunks that they make.

    Raises:
        CancelledError: `is_cancelled()` was true while there was still much to do.
    """
    step_starts = offsets_of(block.sizes)
    ids, tokens = _longest_first(block, dataset.num_tokens)
    sequences = _split(tokens, config, cost)
    rules = Rules(
        dp=config.dp,
        chunk_size=config.chunk_size,
        chunk_ns=cost.passes * cost.chunk_overhead_ns,
        passes=cost.passes,
        tail_sharing=config.tail_sharing,
    )
    placement = place_steps(step_starts, sequences, rules)
    if config.balance == "search":
        refine_assignment(step_starts, sequences, rules, placement, is_cancelled, equal_chunks=config.equal_chunks)
    if config.packing != "bfd":
        refine_packing(step_starts, sequences, rules, placement, is_cancelled, config.packing)
    if config.equal_chunks:
        _fill_up(step_starts, sequences, placement)

    chunks, part_chunk = make_chunks(step_starts, sequences, placement, ids, dataset.num_target_tokens[ids])
    _add_parts(chunks, part_chunk, sequences, ids, dataset.mask)
    layers = split_layers(cost.shape.num_layers, config.pp * config.virtual_stages)
    times = chunk_times(chunks.num_tokens, chunks.attention_pairs, cost.rates, layers)
    by_op = dict(zip(OPS, times.durations.sum(axis=1), strict=True))  # op: [num_chunks]
    recompute = np.where(chunks.keeps_activations, 0, by_op["forward_kv"])  # [num_chunks]
    cost_ns = by_op["forward"] + by_op["backward"] + recompute  # [num_chunks]
    chunks.cost[:] = cost_ns / 1e3
    return ChunkedBlock(step_starts, ids, sequences, placement, chunks, times, cost_ns, recompute)


def schedule_block(block: StepBlock, chunked: ChunkedBlock, config: PlanConfig) -> Scheduled:
    """What the stages of all ranks of a block do.

    Raises:
        UsageError: a rank cannot be scheduled within `memory_tokens`.
    """

    def place(index: int) -> str:
        step, rank = divmod(index, config.dp)
        return f"step {block.first_step + step}, rank {rank}"

    return schedule_ranks(chunked.chunks, chunked.times, config.pp, config.schedule, config.memory_tokens, place)


def _longest_first(block: StepBlock, num_tokens: Int32Array) -> tuple[Int32Array, Int64Array]:
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
    work = work_ns(cost, tokens, attention_pairs_of(tokens, 0 * tokens))
    split = np.flatnonzero(tokens > config.chunk_size)
    num_parts, stops = split_sequences(tokens[split], config.chunk_size, config.split, cost)
    index = np.arange(stops.size) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)  # [num_parts]
    starts = np.where(index == 0, 0, np.concatenate([[0], stops[:-1]]))  # [num_parts]
    k = _most_kept(tokens[split], config.k, config.k_by_length)
    keeps = index >= np.repeat(num_parts - k, num_parts)  # [num_parts]
    part_tokens = stops - starts  # [num_parts]
    part_ns = work_ns(cost, part_tokens, attention_pairs_of(part_tokens, starts)) + cost.passes * cost.chunk_overhead_ns
    part_ns[~keeps] += recompute_ns(cost, part_tokens[~keeps], starts[~keeps]) + cost.chunk_overhead_ns
    work[split] = sum_runs(part_ns, offsets_of(num_parts))
    parts = np.zeros(tokens.size + 1, np.int64)
    parts[split + 1] = num_parts
    return Sequences(tokens=tokens, work=work, parts=np.cumsum(parts), part_tokens=part_tokens, part_keeps=keeps)


def _fill_up(step_starts: Int64Array, sequences: Sequences, placement: Placement) -> None:
    """Give every rank of a step as many chunks as the one that has most, by zero-loss chunks; bounds follow."""
    num_chunks = placement.num_standalone + parts_per_rank(step_starts, sequences, placement)
    placement.num_standalone[:] += num_chunks.max(axis=1, keepdims=True) - num_chunks
    placement.rank_bound[:] = placement.rank_bound.max(axis=1, keepdims=True)
    dp = placement.num_standalone.shape[1]
    placement.step_bound[:] = -(-placement.step_bound // dp) * dp


def _add_parts(
    chunks: Chunks, part_chunk: Int64Array, sequences: Sequences, ids: Int32Array, mask: TargetMask | None
) -> None:
    """Add to each chunk the attention pairs and the targets of the part in it; `part_chunk` [num_parts] says which."""
    sequence = np.repeat(np.arange(ids.size), np.diff(sequences.parts))
    start = chunks.prefix_tokens[part_chunk].astype(np.int64)
    chunks.attention_pairs[part_chunk] += attention_pairs_of(sequences.part_tokens, start)
    chunks.num_target_tokens[part_chunk] += count_part_targets(
        ids[sequence], start, start + sequences.part_tokens, sequences.tokens[sequence], mask
    ).astype(np.int32)


def _most_kept(num_tokens: IntArray, k: int, k_by_length: KByLength | None) -> Int64Array:
    """K of sequences of `num_tokens` [n]: `k`, or that of the last of `k_by_length` whose length they exceed.

    `k_by_length` has pairs (tokens, K), ascending by tokens: sequences of more than that many tokens.
    """
    lengths = np.array([tokens for tokens, _ in k_by_length or ()], np.int64)
    values = np.array([k, *(longer for _, longer in k_by_length or ())], np.int64)
    return values[np.searchsorted(lengths, num_tokens, side="left")]
