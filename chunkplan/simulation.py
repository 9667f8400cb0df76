"""One step of a rank, played through: the Python twin of `chunkplan simulate`.

Chunks come from a plan, or from lengths that go through the planner; times from a cost model, or a token counts as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import ChunkTimes, chunk_times, split_layers
from chunkplan.cost.model import CostModel
from chunkplan.cost.rates import UNIT
from chunkplan.errors import DataError, UsageError
from chunkplan.operations import OPS
from chunkplan.options import given
from chunkplan.planfile.chunks import Chunks, chunks_of_rows
from chunkplan.planfile.load import load_plan
from chunkplan.planfile.places import check_rank, find_step
from chunkplan.planfile.plan import VALIDATE_HINT, Plan, PlanStep
from chunkplan.planning.batches import StepBlock
from chunkplan.planning.method import Dataset, chunk_block
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.families import schedule_ranks
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
    config = plan.config
    described = find_step(plan, step)
    if rank is not None:
        check_rank(plan, rank)
    found = simulate_step(plan, described, _last_rank(described) if rank is None else rank)
    if schedule is None and virtual_stages is None and memory_tokens is None:
        return found
    return reschedule(found, schedule or config.schedule, virtual_stages=virtual_stages, memory_tokens=memory_tokens)


def simulate_step(plan: Plan, described: PlanStep, rank: int) -> Simulation:
    """Simulate a step of `plan`, as `iter_steps` has it, on one of its data-parallel ranks.

    Raises:
        DataError: the plan is damaged.
    """
    config, place = plan.config, f"step {described.step}, rank {rank}"
    chunks = chunks_of_rows(described.chunks.get(rank, ()))
    pp, virtual_stages = config.pp, config.virtual_stages
    actions = planned_actions(described, rank, pp, virtual_stages, chunks.num_tokens.size, place)
    times = _times(chunks, plan.cost, pp, virtual_stages)
    ends = simulate(actions, times)
    if (ends < 0).any():
        raise DataError("stages wait for each other for ever", where=place, hint=VALIDATE_HINT)
    return Simulation(place, config.schedule, pp, virtual_stages, plan.cost, chunks, times, actions, ends)


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
    num_model_stages = pp * config.virtual_stages
    most_chunks = sum(-(-length // config.chunk_size) for length in lengths)
    if most_chunks * num_model_stages > _MOST:
        raise UsageError(
            f"up to {most_chunks:,} chunks on {num_model_stages:,} model stages are too many to simulate",
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
        pp=simulation.pp,
        schedule=schedule,
        **given(virtual_stages=virtual_stages, memory_tokens=memory_tokens),
    )
    return _scheduled(simulation.title, simulation.table, simulation.cost, config)


def compare_schedules(
    simulation: Simulation,
    schedules: Sequence[str],
    *,
    virtual_stages: int | None = None,
    memory_tokens: int | None = None,
) -> list[Simulation]:
    """The same chunks on the same stages under each of `schedules`, of which `simulation` may be one.

    `virtual_stages` is for "interleaved" and `memory_tokens` for "search"; the others take no notice.

    Raises:
        UsageError: see `reschedule`; or nothing in `schedules` takes an argument that is given.
    """
    options = {"interleaved": ("virtual_stages", virtual_stages), "search": ("memory_tokens", memory_tokens)}
    for taker, (name, value) in options.items():
        if value is not None and taker not in schedules:
            raise UsageError(
                f"{name.replace('_', '-')} is for {taker}, which is not compared", hint=f"leave it out, or add {taker}"
            )
    compared = []
    for schedule in schedules:
        name, value = options.get(schedule, ("", None))
        is_same = schedule == simulation.schedule and value is None
        given = {name: value} if value is not None else {}
        compared.append(simulation if is_same else reschedule(simulation, schedule, **given))
    return compared


def _scheduled(title: str, chunks: Chunks, cost: CostModel | None, config: PlanConfig) -> Simulation:
    """`config` says what the schedule is and for what; how the chunks were made does not matter any more."""
    if cost is not None:
        config.check_layers(cost.shape.num_layers, cost.shape.name)
    times = _times(chunks, cost, config.pp, config.virtual_stages)
    found = schedule_ranks(chunks, times, config.pp, config.schedule, config.memory_tokens, lambda _: title)
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
    )


def _times(chunks: Chunks, cost: CostModel | None, pp: int, virtual_stages: int) -> ChunkTimes:
    """The times of chunks. Without `cost` every model stage is one layer, so a stage is `virtual_stages` layers."""
    num_model_stages = pp * virtual_stages
    rates = UNIT if cost is None else cost.rates
    layers = [1] * num_model_stages if cost is None else split_layers(cost.shape.num_layers, num_model_stages)
    return chunk_times(chunks.num_tokens, chunks.attention_pairs, rates, layers)


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
