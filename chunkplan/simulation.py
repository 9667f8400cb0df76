"""One step of a rank, played through: the Python twin of `chunkplan simulate`.

Chunks come from a plan, or from lengths that go through the planner; times from a cost model, or a token counts as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from chunkplan.config.plan import ORDERS_OF_GROUPS, VIRTUAL, PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.errors import UsageError
from chunkplan.options import UNSET
from chunkplan.planfile.chunks import Chunks, chunks_of_rank
from chunkplan.planfile.load import load_plan
from chunkplan.planfile.places import check_rank, find_step
from chunkplan.planfile.plan import Plan, PlanStep
from chunkplan.planning.batches import StepBlock
from chunkplan.planning.method import Dataset, chunk_block
from chunkplan.schedule.actions import actions_of_rank, times_of_rank
from chunkplan.schedule.alignment import meeting_on
from chunkplan.schedule.families import schedule_ranks
from chunkplan.schedule.simulated import Simulation
from chunkplan.schedule.step_ranks import StepRanks, simulate_together, times_of

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
    """Simulate a step of `plan` on some of its data-parallel ranks; where these meet, all ranks together.

    Ranks meet for chunks that they share, and in slots where they share gradients or weights.

    Raises:
        DataError: the plan is damaged.
    """
    config = plan.config
    meets = meeting_on(plan.cost, config.dp) is not None
    meets |= any(chunk.cp_size > 1 for rank in ranks for chunk in described.chunks.get(rank, ()))
    if meets:
        step = simulate_together(plan, described, range(config.dp))
        return {rank: _of_rank(step, rank, f"step {described.step}, rank {rank}", config, plan.cost) for rank in ranks}
    found = {}
    for rank in ranks:
        step = simulate_together(plan, described, [rank])
        alone = _of_rank(step, 0, f"step {described.step}, rank {rank}", config, plan.cost)
        found[rank] = replace(alone, step=None, rank=rank)
    return found


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
        return _scheduled(simulation.title, simulation.table, simulation.cost, config)
    if schedule not in ORDERS_OF_GROUPS and np.any(simulation.step.chunks.cp_size > 1):
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
    """Simulate the chunks of `simulation` on its stages under each of `schedules`.

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
    meeting = None if cost is None else meeting_on(cost, num_ranks)
    found = schedule_ranks(
        chunks, times, config.pp, config.schedule, config.memory_tokens, lambda _: title, num_ranks, meeting=meeting
    )
    step, shown = StepRanks(chunks, times, found.actions, found.ends, meeting), rank or 0
    simulation = _of_rank(step, shown, title, config, cost, int(found.lower_bound[shown]))
    return simulation if rank is not None else replace(simulation, step=None)


def _last_rank(step: PlanStep) -> int:
    """The one that is done last; of several, the first."""
    return max(step.schedule_us, key=lambda place: step.schedule_us[place], default=(0, 0))[0]
