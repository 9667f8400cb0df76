"""Plans some consecutive steps of an epoch: their sequences are split, spread, packed and scheduled."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from chunkplan.arrays import Int32Array, Int64Array, sum_runs
from chunkplan.cost.flops import BACKWARD, CostModel
from chunkplan.planning.chunks import Chunks, make_chunks
from chunkplan.planning.config import PlanConfig
from chunkplan.planning.improve import pack_better, parts_per_rank, spread_better
from chunkplan.planning.ranks import Placement, Rules, Sequences, place_steps
from chunkplan.planning.splitting import split_sequences
from chunkplan.planning.tables import chunks_table, schedule_table, steps_table
from chunkplan.planning.targets import TargetMask, count_part_targets
from chunkplan.schedule.ranks import schedule_ranks

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


def plan_block(
    block: Block, dataset: Dataset, config: PlanConfig, cost: CostModel, stop: threading.Event
) -> dict[str, pa.Table]:
    """The rows of tables `steps`, `chunks` and `schedule` for the steps of `block`.

    Raises:
        CancelledError: `stop` was set while there was still much to do.
    """
    first = np.concatenate([[0], np.cumsum(block.sizes)])
    ids, tokens = _longest_first(block, dataset.num_tokens)
    whole_ns = cost.forward_ns(tokens, 0 * tokens)
    sequences = _split(tokens, whole_ns, config, cost)
    rules = Rules(
        dp=config.dp,
        chunk_size=config.chunk_size,
        chunk_ns=(1 + BACKWARD) * cost.chunk_overhead_ns,
        tail_sharing=bool(config.tail_sharing),
    )
    placement = place_steps(first, sequences, rules)
    if config.balance == "search":
        spread_better(first, sequences, rules, placement, stop, equal_chunks=config.equal_chunks)
    if config.packing != "bfd":
        pack_better(first, sequences, rules, placement, stop, config.packing)
    if config.equal_chunks:
        _fill_up(first, sequences, placement)

    target_tokens = dataset.num_target_tokens[ids]
    chunks = make_chunks(first, sequences, placement, ids, target_tokens, whole_ns)
    _add_parts(chunks, sequences, ids, dataset.mask, cost)
    forward_ns = chunks.forward_ns + cost.chunk_overhead_ns
    cost_ns = forward_ns * (1 + BACKWARD + ~chunks.keeps_activations)
    actions, stage_end_ns = schedule_ranks(
        chunks.rank_chunks, chunks.group_id, chunks.keeps_activations, forward_ns // config.pp, config.pp
    )
    steps = steps_table(
        block.first_step,
        block.epoch,
        first,
        sequences,
        placement,
        target_tokens=target_tokens,
        rank_chunks=chunks.rank_chunks,
        rank_ns=sum_runs(cost_ns, chunks.rank_chunks),
        rank_end_ns=stage_end_ns.reshape(-1, config.pp).max(axis=1),
        necessary_ns=(1 + BACKWARD) * whole_ns,
        chunk_ns=rules.chunk_ns,
        pp=config.pp,
    )
    return {
        "steps": steps,
        "chunks": chunks_table(block.first_step, config.dp, chunks, cost_ns),
        "schedule": schedule_table(block.first_step, config.dp, config.pp, actions, stage_end_ns),
    }


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


def _split(tokens: Int64Array, whole_ns: Int64Array, config: PlanConfig, cost: CostModel) -> Sequences:
    """Cut what is longer than ChunkSize, and say what each sequence costs; `whole_ns` [n] is its forward uncut."""
    work = (1 + BACKWARD) * whole_ns
    split = np.flatnonzero(tokens > config.chunk_size)
    num_parts, ends = split_sequences(tokens[split], config.chunk_size, config.split, cost)
    first = np.cumsum(num_parts) - num_parts
    index = np.arange(ends.size) - np.repeat(first, num_parts)
    starts = np.where(index == 0, 0, np.concatenate([[0], ends[:-1]]))
    keeps = index >= np.repeat(num_parts, num_parts) - config.k
    part_ns = (cost.forward_ns(ends - starts, starts) + cost.chunk_overhead_ns) * (1 + BACKWARD + ~keeps)
    work[split] = sum_runs(part_ns, np.concatenate([[0], np.cumsum(num_parts)]))
    parts = np.zeros(tokens.size + 1, np.int64)
    parts[split + 1] = num_parts
    return Sequences(tokens=tokens, work=work, parts=np.cumsum(parts), part_tokens=ends - starts, part_keeps=keeps)


def _fill_up(first: Int64Array, sequences: Sequences, placement: Placement) -> None:
    """Give every rank of a step as many chunks as the one that has most, by zero-loss chunks; bounds follow."""
    num_chunks = placement.num_standalone + parts_per_rank(first, sequences, placement)
    placement.num_standalone[:] += num_chunks.max(axis=1, keepdims=True) - num_chunks
    placement.rank_bound[:] = placement.rank_bound.max(axis=1, keepdims=True)
    dp = placement.num_standalone.shape[1]
    placement.step_bound[:] = -(-placement.step_bound // dp) * dp


def _add_parts(chunks: Chunks, sequences: Sequences, ids: Int32Array, mask: TargetMask | None, cost: CostModel) -> None:
    """Add to each chunk the forward time and the targets of the part in it."""
    sequence = np.repeat(np.arange(ids.size), np.diff(sequences.parts))
    start = chunks.prefix_tokens[chunks.part_chunk].astype(np.int64)
    chunks.forward_ns[chunks.part_chunk] += cost.forward_ns(sequences.part_tokens, start)
    chunks.num_target_tokens[chunks.part_chunk] += count_part_targets(
        ids[sequence], start, start + sequences.part_tokens, sequences.tokens[sequence], mask
    ).astype(np.int32)
