"""What all ranks of a step of a plan do together, played through: what they share, and the slots in which they meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from chunkplan.arrays import Int8Array, Int64Array, offsets_of
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import ChunkTimes, chunk_times
from chunkplan.cost.model import CostModel
from chunkplan.cost.rates import UNIT
from chunkplan.errors import DataError
from chunkplan.operations import OPS
from chunkplan.planfile.chunks import Chunks, chunks_of_rows, exchange_of
from chunkplan.planfile.plan import VALIDATE_HINT, Plan, PlanStep
from chunkplan.schedule.actions import Actions, join_actions
from chunkplan.schedule.alignment import meeting_on
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.slots import ends_in_slots


class StepRanks(NamedTuple):
    """What all ranks of a step do, which follow one another in `chunks`.

    `ends` is that of `simulate`, or where ranks meet in slots for what `meeting` says (`alignment.meeting_of`), that of
    `ends_in_slots`.
    """

    chunks: Chunks
    times: ChunkTimes
    actions: Actions
    ends: Int64Array
    meeting: Int8Array | None = None


def simulate_together(plan: Plan, described: PlanStep, ranks: Sequence[int]) -> StepRanks:
    """Some ranks of a step simulated together: all of them, or some that meet nobody.

    Raises:
        DataError: the plan is damaged.
    """
    config, place = plan.config, f"step {described.step}" + (f", rank {ranks[0]}" if len(ranks) == 1 else "")
    rows = [described.chunks.get(rank, []) for rank in ranks]
    chunks = chunks_of_rows([row for of_rank in rows for row in of_rank], plan.cost.shape.attention_patterns)
    chunks = chunks._replace(rank_chunks=offsets_of([len(of_rank) for of_rank in rows]))
    actions = join_actions([_planned_actions(described, rank, config) for rank in ranks])
    _check_groups(chunks, place)
    times = times_of(chunks, plan.cost, config)
    meeting = meeting_on(plan.cost, config.dp)
    if meeting is None:
        ends = simulate(chunks, actions, times, config.pp, config.placement, len(ranks))
    else:
        slots = planned_slots(described, config.dp, config.pp)
        ends = ends_in_slots(chunks, actions, times, meeting, slots, config.dp, config.pp, config.placement)
    if (ends < 0).any():
        raise DataError("stages deadlock", where=place, hint=VALIDATE_HINT)
    return StepRanks(chunks, times, actions, ends, meeting)


def _check_groups(chunks: Chunks, place: str) -> None:
    """Raises DataError where ranks do not share chunks of the same kind, so that they could not meet."""
    rank = np.repeat(np.arange(chunks.rank_chunks.size - 1), np.diff(chunks.rank_chunks))
    number = np.arange(rank.size) - chunks.rank_chunks[rank]
    first, size, heads = (column.astype(np.int64) for column in (chunks.cp_first_rank, chunks.cp_size, chunks.cp_heads))
    shared = size > 1
    is_block = (heads > 0) & (size % np.maximum(heads, 1) == 0) & (first >= 0) & (first <= rank)
    is_block &= (rank < first + size) & (first + size < chunks.rank_chunks.size)
    on_first = chunks.rank_chunks[np.where(is_block, first, 0)] + number
    is_block &= on_first < chunks.rank_chunks[np.where(is_block, first, 0) + 1]
    on_first = np.where(is_block, on_first, 0)
    columns = (chunks.cp_tokens, chunks.prefix_tokens, chunks.group_index, chunks.keeps_activations)
    for column in (first, size, heads, *columns, chunks.kept_attention):
        is_block &= column[on_first] == column
    wrong = np.flatnonzero(shared & ~is_block)
    if wrong.size:
        where = f"{place}, rank {rank[wrong[0]]}, chunk {number[wrong[0]]}"
        raise DataError("the ranks that share the chunk do not agree on it", where=where, hint=VALIDATE_HINT)


def _planned_actions(step: PlanStep, rank: int, config: PlanConfig) -> Actions:
    """The actions of a rank's stages, checked as far as simulating them asks for."""
    stages = [step.actions.get((rank, stage), []) for stage in range(config.pp)]
    place, num_chunks = f"step {step.step}, rank {rank}", len(step.chunks.get(rank, []))
    actions = [action for stage in stages for action in stage]
    if not all(stages):
        raise DataError("a stage has no actions", where=place, hint=VALIDATE_HINT)
    for action in actions:
        known = action.op in OPS and 0 <= action.virtual_stage < config.virtual_stages
        if not known or not 0 <= action.chunk_id < num_chunks:
            raise DataError(f"{action} is not of this step", where=place, hint=VALIDATE_HINT)
    return Actions(
        np.array([OPS.index(action.op) for action in actions], np.int8),
        np.array([action.chunk_id for action in actions], np.int32),
        np.array([action.virtual_stage for action in actions], np.int32),
        np.cumsum([0, *(len(stage) for stage in stages)]),
    )


def planned_slots(step: PlanStep, dp: int, pp: int) -> Int64Array:
    """The slot of each action of all ranks of a step, one stage after another: int64 [num_actions].

    Raises:
        DataError: an action has none.
    """
    slots = []
    for rank, stage in product(range(dp), range(pp)):
        own = step.slots.get((rank, stage), [])
        if len(own) != len(step.actions[rank, stage]) or min(own, default=0) < 0:
            where = f"step {step.step}, rank {rank}, stage {stage}"
            raise DataError("not every action has a slot", where=where, hint=VALIDATE_HINT)
        slots += own
    return np.array(slots, np.int64)


def times_of(chunks: Chunks, cost: CostModel | None, config: PlanConfig, *, with_exchange: bool = True) -> ChunkTimes:
    """The times of chunks. Without `cost` every model stage is one layer, so a stage is `virtual_stages` layers."""
    rates = UNIT if cost is None else cost.rates_on(config.dp)
    layers = config.layers(config.pp * config.virtual_stages if cost is None else cost.shape.num_layers)
    exchange = exchange_of(chunks, cost) if cost is not None and with_exchange else None
    return chunk_times(chunks.num_tokens, chunks.attention_pairs, rates, layers, exchange, chunks.kept_attention)
