"""One step of a rank, played through: the Python twin of `chunkplan simulate`.

Chunks come from a plan, or from lengths that go through the planner; times from a cost model, or a token counts as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from chunkplan.arrays import Int64Array, offsets_of
from chunkplan.config.plan import ORDERS_OF_GROUPS, VIRTUAL, PlanConfig
from chunkplan.cost.durations import ChunkTimes, chunk_times
from chunkplan.cost.model import CostModel
from chunkplan.cost.rates import UNIT
from chunkplan.errors import DataError, UsageError
from chunkplan.operations import OPS
from chunkplan.options import given
from chunkplan.planfile.chunks import Chunks, chunks_of_rank, chunks_of_rows, exchange_of
from chunkplan.planfile.load import load_plan
from chunkplan.planfile.places import check_rank, find_step
from chunkplan.planfile.plan import VALIDATE_HINT, Plan, PlanStep
from chunkplan.planning.batches import StepBlock
from chunkplan.planning.method import Dataset, chunk_block
from chunkplan.schedule.actions import Actions, actions_of_rank, join_actions, times_of_rank
from chunkplan.schedule.families import schedule_ranks
from chunkplan.schedule.meetings import StepRanks, simulate_steps
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.simulated import Simulation

#: More chunks on all model stages take minutes and gigabytes, and nobody could look at them.
_MOST = 1 << 18


def simulate_plan(
    plan: Plan | str | Path,
    step: int = 0,
    *,
    rank: int | None = None,
    schedule: str | None = None,
    virtual_stages: int | None = None,
    memory_tokens: int | None = None,
) -> Simulation:
    """Simulate one step of a plan on one data-parallel rank, by default the one that is done last.

    With `schedule` the chunks of the plan are scheduled anew, see `reschedule`.

    Raises:
        UsageError: the plan has no such step or rank, or its chunks cannot be scheduled so.
        DataError: the plan is damaged.
    """
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    described = find_step(plan, step)
    if rank is not None:
        check_rank(plan, rank)
    found = simulate_step(plan, described, _last_rank(described) if rank is None else rank)
    if schedule is None and virtual_stages is None and memory_tokens is None:
        return found
    return reschedule(found, schedule or found.schedule, virtual_stages=virtual_stages, memory_tokens=memory_tokens)


def simulate_step(plan: Plan, described: PlanStep, rank: int) -> Simulation:
    """Simulate a step of `plan`, as `iter_steps` has it, on one of its data-parallel ranks.

    Raises:
        DataError: the plan is damaged.
    """
    return simulate_ranks(plan, described, [rank])[rank]


def simulate_ranks(plan: Plan, described: PlanStep, ranks: Sequence[int]) -> dict[int, Simulation]:
    """Simulate a step of `plan` on some of its data-parallel ranks; where one shares chunks, all ranks together.

    Raises:
        DataError: the plan is damaged.
    """
    config, number = plan.config, described.step
    pp, virtual_stages = config.pp, config.virtual_stages
    shares = any(chunk.cp_size > 1 for rank in ranks for chunk in described.chunks.get(rank, ()))
    step = _together(plan, described) if shares else None
    found = {}
    for rank in ranks:
        title = f"step {number}, rank {rank}"
        if step is not None:
            found[rank] = _of_rank(step, rank, title, config, plan.cost)
            continue
        chunks = chunks_of_rows(described.chunks.get(rank, ()), plan.cost.shape.sights)
        actions = planned_actions(described, rank, pp, virtual_stages, chunks.num_tokens.size, title)
        times = _times(chunks, plan.cost, config)
        ends = _checked_ends(simulate(actions, times, config.v_shaped), title)
        found[rank] = Simulation(
            title,
            config.schedule,
            pp,
            virtual_stages,
            plan.cost,
            chunks,
            times,
            actions,
            ends,
            rank=rank,
            stage_layers=config.stage_layers,
            dp=config.dp,
        )
    return found


def _together(plan: Plan, described: PlanStep) -> StepRanks:
    """All ranks of a step, some of which share chunks, simulated together."""
    config, place = plan.config, f"step {described.step}"
    rows = [described.chunks.get(rank, []) for rank in range(config.dp)]
    chunks = chunks_of_rows([row for of_rank in rows for row in of_rank], plan.cost.shape.sights)
    chunks = chunks._replace(rank_chunks=offsets_of([len(of_rank) for of_rank in rows]))
    actions = join_actions(
        [
            planned_actions(described, rank, config.pp, config.virtual_stages, len(of_rank), f"{place}, rank {rank}")
            for rank, of_rank in enumerate(rows)
        ]
    )
    _check_groups(chunks, place)
    times = _times(chunks, plan.cost, config)
    ends = _checked_ends(simulate_steps(chunks, actions, times, config.dp, config.pp), place)
    return StepRanks(chunks, times, actions, ends)


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
    same = (first, size, heads, chunks.cp_tokens, chunks.prefix_tokens, chunks.group_index, chunks.keeps_activations)
    for column in same:
        is_block &= column[on_first] == column
    wrong = np.flatnonzero(shared & ~is_block)
    if wrong.size:
        where = f"{place}, rank {rank[wrong[0]]}, chunk {number[wrong[0]]}"
        raise DataError("the ranks that share the chunk do not agree on it", where=where, hint=VALIDATE_HINT)


def _checked_ends(ends: Int64Array, place: str) -> Int64Array:
    if (ends < 0).any():
        raise DataError("stages wait for each other for ever", where=place, hint=VALIDATE_HINT)
    return ends


def _of_rank(
    step: StepRanks, rank: int, title: str, config: PlanConfig, cost: CostModel | None, proved_ticks: int = 0
) -> Simulation:
    """One rank of a step whose ranks were simulated together."""
    chunks = chunks_of_rank(step.chunks, rank)
    start, stop = step.actions.stages[[rank * config.pp, (rank + 1) * config.pp]]
    times = times_of_rank(step.chunks, step.times, rank)
    return Simulation(
        title,
        config.schedule,
        config.pp,
        config.virtual_stages,
        cost,
        chunks,
        times,
        actions_of_rank(step.actions, rank, config.pp),
        step.ends[start:stop],
        proved_ticks,
        step,
        rank,
        times.durations - _times(chunks, cost, config, with_exchange=False).durations,
        config.stage_layers,
        config.dp,
    )


def simulate_lengths(
    lengths: Sequence[int],
    *,
    chunk_size: int | None,
    k: int | None = None,
    pp: int = 1,
    schedule: str | None = None,
    virtual_stages: int | None = None,
    memory_tokens: int | None = None,
    cost: CostModel | Literal["unit"] | None = None,
) -> Simulation:
    """Simulate a step of sequences of `lengths`, chunked as `build` does for one data-parallel rank.

    `chunk_size` None: every sequence is a chunk of its own, longest first. `cost`: None stands for `CostModel()`,
    "unit" for a forward of 1 and a backward of 2 a token on every stage, and no time between stages. Other arguments
    are those of `PlanConfig`.

    Raises:
        UsageError: an argument is out of range, or the chunks cannot be scheduled so.
    """
    odd = [length for length in lengths if type(length) is not int or not 0 < length < 2**31]
    if odd or not lengths:
        found = f"a length is {odd[0]!r}" if odd else "there are no lengths"
        raise UsageError(f"{found}, expected whole numbers from 1 to {2**31 - 1}", hint="lengths count tokens")
    if chunk_size is not None and k is None:
        raise UsageError("k is missing", hint="say how many chunks of a sequence hold activations, for example 2")
    config = PlanConfig(
        chunk_size=max(lengths) if chunk_size is None else chunk_size,
        k=1 if k is None else k,
        global_batch=len(lengths),
        pp=pp,
        **given(schedule=schedule, virtual_stages=virtual_stages, memory_tokens=memory_tokens),
    )
    num_stages = pp * config.virtual_stages
    most_chunks = sum(-(-length // config.chunk_size) for length in lengths)
    if most_chunks * num_stages > _MOST:
        raise UsageError(
            f"up to {most_chunks:,} chunks on {num_stages:,} model stages are too many to simulate",
            hint="use a larger chunk-size, or fewer sequences",
        )
    model = CostModel() if cost is None or cost == "unit" else cost
    tokens = np.array(lengths, np.int32)
    order = np.argsort(-tokens, kind="stable").astype(np.int32)
    whole = chunk_size is None  # a step of its own for each sequence, so that none are packed
    block = StepBlock(0, 0, order, np.ones(len(lengths), np.int64) if whole else np.array([len(lengths)]))
    table = chunk_block(block, Dataset(tokens, tokens - 1, None), config, model).chunks
    return _scheduled(
        f"{len(lengths):,} sequences, {sum(lengths):,} tokens",
        table._replace(rank_chunks=np.array([0, table.num_tokens.size])),  # all of them as those of one rank
        None if cost == "unit" else model,
        config,
    )


def reschedule(
    simulation: Simulation, schedule: str, *, virtual_stages: int | None = None, memory_tokens: int | None = None
) -> Simulation:
    """The same chunks on the same stages under another schedule; the arguments are those of `PlanConfig`.

    Raises:
        UsageError: there is no such schedule for so many stages, or the chunks do not fit `memory_tokens`.
    """
    config = PlanConfig(
        chunk_size=max(int(simulation.table.num_tokens.max()), 1),
        k=1,
        dp=simulation.dp,
        pp=simulation.pp,
        schedule=schedule,
        stage_layers=simulation.stage_layers if simulation.virtual_stages == 1 and schedule not in VIRTUAL else None,
        **given(virtual_stages=virtual_stages, memory_tokens=memory_tokens),
    )
    if simulation.step is None:
        return _scheduled(simulation.title, simulation.table, simulation.cost, config)
    if schedule not in ORDERS_OF_GROUPS:
        raise UsageError(
            f"schedule {schedule} orders every rank by itself: groups of ranks would wait for each other",
            where=simulation.title,
            hint=f"use {' or '.join(ORDERS_OF_GROUPS[1:])}, or a step without shared sequences",
        )
    return _scheduled(simulation.title, simulation.step.chunks, simulation.cost, config, simulation.rank)


def compare_schedules(
    simulation: Simulation,
    schedules: Sequence[str],
    *,
    virtual_stages: int | None = None,
    memory_tokens: int | None = None,
) -> list[Simulation]:
    """The same chunks on the same stages under each of `schedules` once, of which `simulation` may be one.

    `virtual_stages` is for "interleaved", `memory_tokens` for "search", "auto" and "zero-bubble", and for no others.

    Raises:
        UsageError: see `reschedule`; or nothing in `schedules` takes an argument that is given.
    """
    options = {"interleaved": ("virtual_stages", virtual_stages)}
    options |= dict.fromkeys(("auto", "zero-bubble", "search"), ("memory_tokens", memory_tokens))
    for taker, (name, value) in options.items():
        if value is not None and all(options.get(schedule, ("", None))[0] != name for schedule in schedules):
            raise UsageError(
                f"{name.replace('_', '-')} is for {taker}, which is not compared", hint=f"leave it out, or add {taker}"
            )
    compared = []
    for schedule in dict.fromkeys(schedules):
        name, value = options.get(schedule, ("", None))
        is_same = schedule == simulation.schedule and value is None
        compared.append(simulation if is_same else reschedule(simulation, schedule, **given(**{name: value})))
    return compared


def _scheduled(
    title: str, chunks: Chunks, cost: CostModel | None, config: PlanConfig, rank: int | None = None
) -> Simulation:
    """`config` says what the schedule is and for what; how the chunks were made does not matter any more.

    `chunks`: of one rank, or of all ranks of a step, of which `rank` is shown.
    """
    if cost is not None:
        config.check_layers(cost.shape.num_layers, cost.shape.name)
    times, num_ranks = _times(chunks, cost, config), chunks.rank_chunks.size - 1
    found = schedule_ranks(chunks, times, config.pp, config.schedule, config.memory_tokens, lambda _: title, num_ranks)
    if rank is not None:
        step = StepRanks(chunks, times, found.actions, found.ends)
        return _of_rank(step, rank, title, config, cost, int(found.lower_bound[rank]))
    return Simulation(
        title,
        config.schedule,
        config.pp,
        config.virtual_stages,
        cost,
        chunks,
        times,
        found.actions,
        found.ends,
        int(found.lower_bound[0]),
        stage_layers=config.stage_layers,
        dp=config.dp,
    )


def _times(chunks: Chunks, cost: CostModel | None, config: PlanConfig, *, with_exchange: bool = True) -> ChunkTimes:
    """The times of chunks. Without `cost` every model stage is one layer, so a stage is `virtual_stages` layers."""
    rates = UNIT if cost is None else cost.rates_on(config.dp)
    layers = config.layers(config.pp * config.virtual_stages if cost is None else cost.shape.num_layers)
    exchange = exchange_of(chunks, cost) if cost is not None and with_exchange else None
    return chunk_times(chunks.num_tokens, chunks.attention_pairs, rates, layers, exchange)


def _last_rank(step: PlanStep) -> int:
    """The one that is done last; of several, the first."""
    return max(step.schedule_us, key=lambda place: step.schedule_us[place], default=(0, 0))[0]


def planned_actions(step: PlanStep, rank: int, pp: int, virtual_stages: int, num_chunks: int, place: str) -> Actions:
    """The actions of a rank's stages, checked as far as simulating them asks for."""
    stages = [step.actions.get((rank, stage), []) for stage in range(pp)]
    actions = [action for stage in stages for action in stage]
    if not all(stages):
        raise DataError("a stage has no actions", where=place, hint=VALIDATE_HINT)
    for action in actions:
        known = action.op in OPS and 0 <= action.virtual_stage < virtual_stages
        if not known or not 0 <= action.chunk_id < num_chunks:
            raise DataError(f"{action} is not of this step", where=place, hint=VALIDATE_HINT)
    return Actions(
        np.array([OPS.index(action.op) for action in actions], np.int8),
        np.array([action.chunk_id for action in actions], np.int32),
        np.array([action.virtual_stage for action in actions], np.int32),
        np.cumsum([0, *(len(stage) for stage in stages)]),
    )
