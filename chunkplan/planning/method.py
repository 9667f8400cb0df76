"""The method at a glance: parts -> ranks -> chunks -> order -> prediction, of some steps at a time.

In the words of ChunkFlow (arXiv 2503.02356), from top to bottom:

1. *Batches.* Every epoch is shuffled and cut into global batches, the steps (`batches.py`).
2. *Parts.* A sequence longer than ChunkSize is cut into parts of at most ChunkSize tokens, each for a *dependent
   chunk*; together they are a *group*. The last K of them keep their activations (`splitting.py`).
3. *Ranks.* The sequences of a step are assigned to data-parallel ranks to minimize the time of the slowest rank
   (`ranks.py`, and `refine.py` where a search may do better); a sequence with more work than a rank's share may be
   shared by a block of ranks, a *context-parallel group* (`sharing.py`).
4. *Chunks.* On each rank the short sequences are packed, several to a *standalone chunk*, and some into the room that
   parts leave in theirs: Algorithm 1 (`ranks.py`, `chunks.py`, and the packers of `chunkplan/packing/`).
5. *Order.* Stages run the forward and the backward of every chunk in an order in which a stage never holds the
   activations of more than K chunks of a group. The others run a forward for their keys and values alone, and another,
   the *recompute*, before their backward: Algorithm 2 on one stage, state-aware 1F1B on more (`chunkplan/schedule/`).
   Where that pays, the recompute reuses the output of attention of the first forward (`kept_attention.py`).
6. *Prediction.* Time and memory of each step follow from the cost model (`chunkplan/cost/`), and go into the plan's
   tables (`tables.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, offsets_of, sum_runs
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import forward_work_ns, whole_pairs, work_ns
from chunkplan.cost.model import CostModel
from chunkplan.errors import UsageError
from chunkplan.planfile.chunks import Chunks, pairs_of_chunks
from chunkplan.planfile.schema import PREFIXES, plan_schemas
from chunkplan.planning.batches import SampleGroups, StepBlock, longest_first
from chunkplan.planning.chunks import ChunkedBlock, add_part_targets, make_chunks, time_chunks
from chunkplan.planning.forest import grow_forest
from chunkplan.planning.kept_attention import keep_on_gpu, keep_on_host
from chunkplan.planning.memory import memory_rates_of
from chunkplan.planning.ranks import PackingParams, assign_and_pack
from chunkplan.planning.refine import equalize_chunks, refine_assignment, refine_packing
from chunkplan.planning.sharing import share_sequences
from chunkplan.planning.splitting import TargetMask, cut_sequences
from chunkplan.planning.tables import chunks_table, schedule_table, steps_table
from chunkplan.planning.trees import TokensOf
from chunkplan.planning.whole import assign_whole
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.families import Scheduled, schedule_ranks
from chunkplan.schedule.forwards import extra_forwards, forwards_ns
from chunkplan.schedule.holdings import highest_peak, peak_snapshots
from chunkplan.schedule.slots import greedy_slots, slot_ops_of, slot_ops_on


@dataclass(frozen=True)
class Dataset:
    """Tokens and targets of every sequence, int32 [n]; masks, unless every token but a sequence's first is a target.

    `tokens_of`: the tokens of a sequence, where prefixes may be shared. `groups`: sequences that come in one step.
    `has_reference`: tokens have log-probabilities of a reference model.
    """

    num_tokens: Int32Array
    num_target_tokens: Int32Array
    mask: TargetMask | None
    tokens_of: TokensOf | None = None
    groups: SampleGroups | None = None
    has_reference: bool = False


@dataclass(frozen=True)
class Planned:
    """Rows of the tables `steps`, `chunks` and `schedule`, and the peak memory of each stage in these steps.

    `chunks`: those of the table. `peaks` int64 [pp, 8]: see `peak_snapshots`; `ranks` int64 [pp]: where that is, as
    step x dp + rank.
    """

    tables: dict[str, pa.Table]
    chunks: Chunks
    peaks: Int64Array
    ranks: Int64Array


def plan_block(
    block: StepBlock, dataset: Dataset, config: PlanConfig, cost: CostModel, is_cancelled: Callable[[], bool]
) -> Planned:
    """Plan the steps of `block`: their rows, and the peak memory of stages. Steps that take longer with shared prefixes
    than without share none.

    Raises:
        CancelledError: `is_cancelled()` was true while there was still much to do.
        UsageError: a rank cannot be scheduled within `memory_tokens`.
    """
    planned = _plan(block, dataset, config, cost, is_cancelled)
    if dataset.tokens_of is None or not config.share_prefixes or not planned.tables["prefixes"].num_rows:
        return planned
    alone = _plan(block, replace(dataset, tokens_of=None), config, cost, is_cancelled)
    took_us, alone_us = (each.tables["steps"]["predicted_us"].to_numpy() for each in (planned, alone))
    shares = took_us <= alone_us
    return planned if shares.all() else _plan(block, dataset, config, cost, is_cancelled, shares)


def _plan(
    block: StepBlock,
    dataset: Dataset,
    config: PlanConfig,
    cost: CostModel,
    is_cancelled: Callable[[], bool],
    shares: BoolArray | None = None,
) -> Planned:
    """Plan the steps of `block`; those where `shares` [num_steps] is false share no prefixes."""
    chunked = chunk_block(block, dataset, config, cost, is_cancelled, shares)
    scheduled = schedule_block(block, chunked, config, cost, is_cancelled)
    if keep_on_gpu(chunked.chunks, chunked.times.durations, scheduled.actions, config, cost).size:
        times, cost_ns, recompute_ns = time_chunks(chunked.chunks, config, cost)
        is_same = np.array_equal(times.durations, chunked.times.durations)  # the link to the host held up nothing
        chunked = replace(chunked, times=times, cost_ns=cost_ns, recompute_ns=recompute_ns)
        if not is_same:
            scheduled = schedule_block(block, chunked, config, cost, is_cancelled, scheduled.actions)
    return predict_block(block, dataset, config, cost, chunked, scheduled)


def check_shared(config: PlanConfig, cost: CostModel) -> None:
    """Raise UsageError where sequences are to share prefixes in a model that does not see these by attention alone."""
    if config.share_prefixes and cost.shape.is_recurrent:
        raise UsageError(
            f"share-prefixes is for attention, and {cost.shape.name} has recurrent layers",
            hint="leave share-prefixes out",
        )


def chunk_block(
    block: StepBlock,
    dataset: Dataset,
    config: PlanConfig,
    cost: CostModel,
    is_cancelled: Callable[[], bool] = lambda: False,
    has_trees: BoolArray | None = None,
) -> ChunkedBlock:
    """Parts, ranks and chunks: the sequences of a block, each in its place, and the chunks that they make.

    `has_trees` bool [num_steps]: the steps that share prefixes, where `config` lets them; left out, all.

    Raises:
        CancelledError: `is_cancelled()` was true while there was still much to do.
    """
    step_starts = offsets_of(block.sizes)  # [num_steps + 1]
    ids, tokens = longest_first(block, dataset.num_tokens)  # [num_sequences] both
    pairs, forest = whole_pairs(cost, tokens), None
    if config.share_prefixes and dataset.tokens_of is not None:
        forest = grow_forest(step_starts, ids, tokens, dataset.tokens_of, config, cost, has_trees)
        step_starts, ids, tokens, pairs = forest.step_starts, forest.ids, forest.tokens, forest.pairs
    necessary_ns = work_ns(cost, tokens, pairs)  # [num_sequences]
    sequences = cut_sequences(tokens, necessary_ns, config, cost)
    if forest is not None:
        sequences = forest.cut(sequences, config.chunk_size)

    params = PackingParams(
        dp=config.dp,
        chunk_size=config.chunk_size,
        chunk_ns=cost.chunk_ns,
        forward_equivalents=cost.forward_equivalents,
        tail_sharing=config.tail_sharing,
    )
    bound_ns = None if forest is None else forest.bound_ns
    if config.cp != "off":
        shares, bound_ns = share_sequences(step_starts, sequences, necessary_ns, config, cost)
        sequences = cut_sequences(tokens, necessary_ns, config, cost, shares)
    if config.micro_batches is not None:
        assignment = assign_whole(
            step_starts,
            tokens,
            necessary_ns,
            config.dp,
            config.chunk_size,
            config.micro_batches,
            equal_sequences=config.equal_sequences,
            stages=config.pp,
            first_step=block.first_step,
        )
    else:
        assignment = assign_and_pack(step_starts, sequences, params)
    if config.balance == "search":
        refine_assignment(step_starts, sequences, params, assignment, is_cancelled, equal_chunks=config.equal_chunks)
    if config.packing != "bfd" and config.micro_batches is None:
        refine_packing(step_starts, sequences, params, assignment, is_cancelled, config.packing)
    if config.equal_chunks:
        equalize_chunks(step_starts, sequences, assignment)

    targets = dataset.num_target_tokens[ids] if forest is None else forest.targets(dataset.num_target_tokens)
    chunks = make_chunks(step_starts, sequences, assignment, ids, targets, config.cp != "off")
    add_part_targets(chunks, config.dp, dataset.mask if forest is None else forest.mask_of(dataset.mask))
    if forest is not None:
        chunks = forest.spread(chunks)
    chunks = chunks._replace(attention_pairs=pairs_of_chunks(chunks, cost.shape.attention_patterns))
    keep_on_host(chunks, config, cost)
    times, cost_ns, recompute_ns = time_chunks(chunks, config, cost)  # [num_chunks] the last two
    return ChunkedBlock(
        step_starts, ids, necessary_ns, sequences, assignment, chunks, times, cost_ns, recompute_ns, bound_ns, forest
    )


def schedule_block(
    block: StepBlock,
    chunked: ChunkedBlock,
    config: PlanConfig,
    cost: CostModel,
    is_cancelled: Callable[[], bool] = lambda: False,
    actions: Actions | None = None,
) -> Scheduled:
    """Order: what the stages of all ranks of a block do with their chunks, one action after another, and when.

    `actions`: an order that there is already.

    Raises:
        CancelledError: `is_cancelled()` was true while there was still much to do.
        UsageError: a rank cannot be scheduled within `memory_tokens`.
    """

    def rank_label(index: int) -> str:
        step, rank = divmod(index, config.dp)
        return f"step {block.first_step + step}, rank {rank}"

    return schedule_ranks(
        chunked.chunks,
        chunked.times,
        config.pp,
        config.schedule,
        config.memory_tokens,
        rank_label,
        config.dp,
        is_cancelled,
        slot_ops_on(cost, config.dp),
        actions,
    )


def predict_block(
    block: StepBlock,
    dataset: Dataset,
    config: PlanConfig,
    cost: CostModel,
    chunked: ChunkedBlock,
    scheduled: Scheduled,
) -> Planned:
    """Prediction: the time of each step on its ranks, what each stage holds at most, and the rows that say so."""
    slots = scheduled.slots
    if slots is None and config.dp > 1:  # for trainers that share more than the plan counts with
        of_ranks = chunked.chunks, scheduled.actions, chunked.times
        slots = greedy_slots(*of_ranks, slot_ops_of("weights"), config.dp, config.pp, config.placement)
    before_ns, before_bound_ns = _extra_forwards(dataset, config, cost, chunked, scheduled)
    held = memory_rates_of(config, cost)
    moments, ranks = highest_peak(peak_snapshots(chunked.chunks, scheduled.actions, held), held)
    stage_end = scheduled.stage_end + np.repeat(before_ns, config.dp * config.pp)
    tables = {
        "steps": steps_table(
            plan_schemas(config.entries())["steps"],
            block,
            chunked,
            scheduled,
            dataset.num_tokens,
            dataset.num_target_tokens,
            cost.chunk_ns,
            (before_ns, before_bound_ns),
        ),
        "chunks": chunks_table(plan_schemas(config.entries())["chunks"], block.first_step, config.dp, chunked.chunks),
        "schedule": schedule_table(block.first_step, config.dp, config.pp, scheduled.actions, stage_end, slots),
    }
    if config.share_prefixes:
        forest = chunked.forest
        tables["prefixes"] = PREFIXES.empty_table() if forest is None else forest.prefixes_table(block.first_step)
    return Planned(tables, chunked.chunks, moments, block.first_step * config.dp + ranks)


def _extra_forwards(
    dataset: Dataset, config: PlanConfig, cost: CostModel, chunked: ChunkedBlock, scheduled: Scheduled
) -> tuple[Int64Array, Int64Array]:
    """Time of the forwards that the loss adds to each step, and the least that they take: int64 [num_steps]."""
    number = extra_forwards(config.loss, cost, has_reference=dataset.has_reference)
    if not number:
        none = np.zeros(chunked.step_starts.size - 1, np.int64)
        return none, none
    of_ranks = chunked.chunks, scheduled.actions, chunked.times, config.dp, config.pp, config.placement
    took_ns = forwards_ns(*of_ranks, slot_ops_on(cost, config.dp), scheduled.slots)
    work = forward_work_ns(cost, chunked.chunks.num_tokens, chunked.chunks.attention_pairs)
    least_ns = sum_runs(work, chunked.chunks.rank_chunks[:: config.dp]) // config.dp
    if chunked.bound_ns is None:  # nothing is shared
        tokens, starts = chunked.sequences.tokens, chunked.step_starts[:-1]
        alone = forward_work_ns(cost, tokens, whole_pairs(cost, tokens))
        least_ns = np.maximum(least_ns, np.maximum.reduceat(alone, starts))
    return number * took_ns, number * np.minimum(least_ns // config.pp, took_ns)
