"""Simulation of one step of a rank: the Python twin of `chunkplan simulate`.

Chunks come from a plan, or from lengths that go through the planner; times from a cost model, or a token counts as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np

from chunkplan.arrays import Int64Array, offsets_of
from chunkplan.config.plan import ORDERS_OF_GROUPS, VIRTUAL, PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.errors import DataError, UsageError
from chunkplan.operations import OPS
from chunkplan.options import UNSET, options_of
from chunkplan.planfile.chunks import Chunks, chunks_of_rank, chunks_of_rows, times_of
from chunkplan.planfile.load import load_plan
from chunkplan.planfile.plan import VALIDATE_HINT, Action, Plan, PlanStep, check_rank, find_step
from chunkplan.planning.batches import StepBlock
from chunkplan.planning.method import Dataset, chunk_block
from chunkplan.schedule.actions import Actions, actions_of_rank, times_of_rank
from chunkplan.schedule.families import schedule_ranks
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.slots import ends_in_slots, slot_ops_on
from chunkplan.schedule.timeline import Simulation, StepRanks

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

    Example: `chunkplan.simulate_plan("plan", step=0)`

    With `schedule` the chunks of the plan are scheduled anew, see `reschedule`.

    Raises:
        UsageError: the plan has no such step or rank, or its chunks cannot be scheduled so.
        DataError: the plan is damaged.
    """
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    described = find_step(plan, step)
    if rank is None:  # that of the stage that is done last
        rank, _ = max(described.schedule_us, key=lambda place: described.schedule_us[place], default=(0, 0))
    check_rank(plan, rank)
    found = simulate_ranks(plan, described, [rank])[rank]
    if schedule is None and virtual_stages is None and memory_tokens is None:
        return found
    return reschedule(found, schedule or found.schedule, virtual_stages=virtual_stages, memory_tokens=memory_tokens)


def simulate_ranks(plan: Plan, described: PlanStep, ranks: Sequence[int]) -> dict[int, Simulation]:
    """Simulate a step of `plan` on some of its data-parallel ranks; where these meet, all ranks together.

    Ranks meet for chunks that they share, and in slots where they share gradients or weights.

    Raises:
        DataError: the plan is damaged.
    """
    config = plan.config
    meets = slot_ops_on(plan.cost, config.dp) is not None
    meets |= any(chunk.cp_size > 1 for rank in ranks for chunk in described.chunks.get(rank, ()))
    found, together = {}, _simulate_together(plan, described, range(config.dp)) if meets else None
    for rank in ranks:
        step = together or _simulate_together(plan, described, [rank])
        shared = f" ({described.num_tokens:,} tokens{words})" if (words := described.prefix_words) else ""
        title = f"step {described.step}{shared}, rank {rank}"
        of_rank = _of_rank(step, rank if meets else 0, title, config, plan.cost)
        found[rank] = replace(of_rank, extra_forward=described.extra_forward_us)
        if not meets:
            found[rank] = replace(found[rank], step=None, rank=rank)
    return found


def _simulate_together(plan: Plan, described: PlanStep, ranks: Sequence[int]) -> StepRanks:
    """Some ranks of a step simulated together: all of them, or one that meets nobody."""
    config, place = plan.config, f"step {described.step}" + (f", rank {ranks[0]}" if len(ranks) == 1 else "")
    rows = [described.chunks.get(rank, []) for rank in ranks]
    chunks = chunks_of_rows([row for of_rank in rows for row in of_rank], plan.cost.shape.attention_patterns)
    chunks = chunks._replace(rank_chunks=offsets_of([len(of_rank) for of_rank in rows]))
    slot_ops = slot_ops_on(plan.cost, config.dp)
    actions, slots = _planned_actions(described, ranks, config, has_slots=slot_ops is not None)
    _check_groups(chunks, place)
    times = times_of(chunks, plan.cost, config)
    if slot_ops is None:
        ends = simulate(chunks, actions, times, config.pp, config.placement, len(ranks))
    else:
        ends = ends_in_slots(chunks, actions, times, slot_ops, slots, config.dp, config.pp, config.placement)
    if (ends < 0).any():
        raise DataError("stages deadlock", where=place, hint=VALIDATE_HINT)
    return StepRanks(chunks, times, actions, ends, slot_ops)


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


def _planned_actions(
    step: PlanStep, ranks: Sequence[int], config: PlanConfig, *, has_slots: bool
) -> tuple[Actions, Int64Array]:
    """The actions of some ranks' stages, and their slots, checked as far as simulating them asks for."""
    actions, slots, sizes = list[Action](), list[int](), list[int]()
    for rank, stage in product(ranks, range(config.pp)):
        place, num_chunks = f"step {step.step}, rank {rank}", len(step.chunks.get(rank, []))
        own, own_slots = step.actions.get((rank, stage), []), step.slots.get((rank, stage), [])
        if not own:
            raise DataError("a stage has no actions", where=place, hint=VALIDATE_HINT)
        for action in own:
            is_known = action.op in OPS and 0 <= action.virtual_stage < config.virtual_stages
            if not is_known or not 0 <= action.chunk_id < num_chunks:
                raise DataError(f"{action} is not of this step", where=place, hint=VALIDATE_HINT)
        if has_slots and (len(own_slots) != len(own) or min(own_slots) < 0):
            raise DataError("not every action has a slot", where=f"{place}, stage {stage}", hint=VALIDATE_HINT)
        actions += own
        slots += own_slots
        sizes.append(len(own))
    found = Actions(
        np.array([OPS.index(action.op) for action in actions], np.int8),
        np.array([action.chunk_id for action in actions], np.int32),
        np.array([action.virtual_stage for action in actions], np.int32),
        offsets_of(sizes),
    )
    return found, np.array(slots, np.int64)


def _of_rank(
    step: StepRanks, rank: int, title: str, config: PlanConfig, cost: CostModel | None, proved_ticks: int = 0
) -> Simulation:
    """One rank of a step whose ranks were simulated together."""
    chunks = chunks_of_rank(step.chunks, rank)
    start, stop = step.actions.stages[[rank * config.pp, (rank + 1) * config.pp]]
    times = times_of_rank(step.chunks, step.times, rank)
    shares = bool(np.any(chunks.cp_size > 1))
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
        times.durations - times_of(chunks, cost, config, with_exchange=False).durations if shares else None,
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

    Example: `chunkplan.simulate_lengths([900, 70], chunk_size=64, k=2, pp=2)`

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
        keep_attention="off" if cost == "unit" else "auto",  # units do not tell attention from the rest
        schedule=UNSET if schedule is None else schedule,
        virtual_stages=UNSET if virtual_stages is None else virtual_stages,
        memory_tokens=memory_tokens,
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
        virtual_stages=UNSET if virtual_stages is None else virtual_stages,
        memory_tokens=memory_tokens,
    )
    if simulation.step is None:
        found = _scheduled(simulation.title, simulation.table, simulation.cost, config)
        return replace(found, extra_forward=simulation.extra_forward)
    if schedule not in ORDERS_OF_GROUPS and np.any(simulation.step.chunks.cp_size > 1):
        raise UsageError(
            f"schedule {schedule} orders every rank by itself: groups of ranks would deadlock",
            where=simulation.title,
            hint=f"use {' or '.join(ORDERS_OF_GROUPS[1:])}, or a step without shared sequences",
        )
    found = _scheduled(simulation.title, simulation.step.chunks, simulation.cost, config, simulation.rank)
    return replace(found, extra_forward=simulation.extra_forward)


def compare_schedules(
    simulation: Simulation,
    schedules: Sequence[str],
    *,
    virtual_stages: int | None = None,
    memory_tokens: int | None = None,
) -> list[Simulation]:
    """Simulate the chunks of `simulation` on its stages under each of `schedules`.

    Example: `chunkplan.compare_schedules(chunkplan.simulate_lengths([900], chunk_size=64, k=2, pp=2), ["1f1b"])`

    `virtual_stages` is for "interleaved", `memory_tokens` for "search", "auto" and "zero-bubble", and for no others.

    Raises:
        UsageError: see `reschedule`; or nothing in `schedules` takes an argument that is given.
    """
    options = {"interleaved": ("virtual_stages", virtual_stages)}
    options |= dict.fromkeys(("auto", "zero-bubble", "search"), ("memory_tokens", memory_tokens))
    for taker, (name, value) in options.items():
        if value is not None and all(options.get(schedule, ("", None))[0] != name for schedule in schedules):
            called = options_of(PlanConfig)[name].called
            raise UsageError(f"{called} is for {taker}, which is not compared", hint=f"leave it out, or add {taker}")
    compared = []
    for schedule in dict.fromkeys(schedules):
        name, value = options.get(schedule, ("", None))
        is_same = schedule == simulation.schedule and value is None
        compared.append(simulation if is_same else reschedule(simulation, schedule, **({name: value} if name else {})))
    return compared


def _scheduled(
    title: str, chunks: Chunks, cost: CostModel | None, config: PlanConfig, rank: int | None = None
) -> Simulation:
    """`config` says what the schedule is and for what; how the chunks were made does not matter any more.

    `chunks`: of one rank, or of all ranks of a step, of which `rank` is shown.
    """
    if cost is not None:
        config.check_layers(cost.shape.num_layers, cost.shape.name)
    times, num_ranks = times_of(chunks, cost, config), chunks.rank_chunks.size - 1
    slot_ops = None if cost is None else slot_ops_on(cost, num_ranks)
    found = schedule_ranks(
        chunks, times, config.pp, config.schedule, config.memory_tokens, lambda _: title, num_ranks, slot_ops=slot_ops
    )
    step, shown = StepRanks(chunks, times, found.actions, found.ends, slot_ops), rank or 0
    simulation = _of_rank(step, shown, title, config, cost, int(found.lower_bound[shown]))
    return simulation if rank is not None else replace(simulation, step=None)
