"""The memory that a plan is predicted to take: of the fullest GPU, part by part."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import Float64Array
from chunkplan.cost.memory import StageMemory
from chunkplan.cost.model import CostModel, Sharding
from chunkplan.cost.token_bytes import MemoryRates
from chunkplan.errors import DataError
from chunkplan.operations import OPS
from chunkplan.planfile.chunks import Chunks
from chunkplan.planfile.plan import VALIDATE_HINT, Plan, find_step
from chunkplan.planfile.schema import SCHEDULE
from chunkplan.planfile.tables import read_table
from chunkplan.planning.memory import LongestSequence, host_bytes_of, memory_of_stages, memory_rates_of
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.holdings import highest_peak, kv_tokens, peak_snapshots, snapshot_bytes, stage_snapshots
from chunkplan.simulation import simulate_ranks
from chunkplan.tuning.trial import longest_of
from chunkplan.validation.schedule_columns import ScheduleColumns


@dataclass(frozen=True, kw_only=True)
class PlanMemory:
    """Peak memory of a GPU of the stage with the highest peak, and the step, rank and stage of it.

    `host_bytes`: host memory of a GPU at its peak, on the stage that keeps most there. `sharding`: which of optimizer
    states, gradients and weights are sharded over the `dp` data-parallel ranks. `gpu_bytes`: memory of the GPU.
    `longest`: the longest sequence that fits, by number of ranks that share it; none where other chunks decide.
    """

    step: int
    dp_rank: int
    stage: int
    dp: int
    sharding: Sharding
    memory: StageMemory
    gpu_bytes: int
    host_bytes: int
    longest: tuple[LongestSequence, ...]

    @property
    def fits(self) -> bool:
        """True if the GPU has as much memory."""
        return self.memory.total <= self.gpu_bytes

    def to_dict(self) -> dict[str, Any]:
        """All of it, the `total` and whether it `fits`, for one JSON document."""
        document = asdict(self)
        document["memory"]["total"] = self.memory.total
        return {**document, "fits": self.fits}


def plan_memory(plan: Plan, chunks: Chunks) -> PlanMemory | None:
    """Predict the memory of `plan`, whose chunks are `chunks`; None where its manifest does not describe the
    model and the GPU it was planned for.

    It looks at all actions of all steps.

    Raises:
        DataError: schedule.parquet is damaged, or chunks and actions do not belong together.
    """
    try:
        cost = plan.cost
    except DataError:
        return None
    config = plan.config
    moments, ranks = _peak_snapshots(plan, chunks, config, memory_rates_of(config, cost))
    return memory_at(moments, ranks, config, cost)


def memory_at(moments: Int64Array, ranks: Int64Array, config: PlanConfig, cost: CostModel) -> PlanMemory:
    """The memory of a plan whose stages hold `moments` int64 [pp, 8] at most, on `ranks`, as `BuiltPlan` has them."""
    memory = memory_of_stages(config, cost, moments)
    stage = max(range(config.pp), key=lambda stage: memory[stage].total)
    gpu_bytes = cost.hardware.memory_bytes
    return PlanMemory(
        step=int(ranks[stage]) // config.dp,
        dp_rank=int(ranks[stage]) % config.dp,
        stage=stage,
        dp=config.dp,
        sharding=cost.sharding,
        memory=memory[stage],
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes_of(config, cost, moments),
        longest=longest_of(config, cost, memory[stage], gpu_bytes),
    )


#: Moments of a step that are told: more cannot be seen apart.
_MOST_MOMENTS = 400


def memory_over_step(plan: Plan, peak: PlanMemory) -> tuple[Float64Array, list[StageMemory]]:
    """Seconds at which actions of the stage and step of a plan's `peak` begin, or come to most, and its memory then.

    Of many actions in a row it is the one that takes most.
    """
    cost, config, stage = plan.cost, plan.config, peak.stage
    simulation = simulate_ranks(plan, find_step(plan, peak.step), [peak.dp_rank])[peak.dp_rank]
    own = slice(*simulation.actions.stages[stage : stage + 2])
    chunks, actions = simulation.table, simulation.actions
    found = np.zeros((own.stop - own.start, 2, config.pp, 8), np.int64)
    found[:, :, stage] = stage_snapshots(chunks, kv_tokens(chunks), actions, 0, stage, config.pp)
    num_bytes = snapshot_bytes(found.reshape(-1, config.pp, 8), memory_rates_of(config, cost))[:, stage]
    runs = np.array_split(np.arange(num_bytes.size), min(_MOST_MOMENTS, len(found)))
    places = [int(run[num_bytes[run].argmax()]) for run in runs]
    seconds = simulation.starts[own][[place // 2 for place in places]] / simulation.ticks / 1e6
    held = [memory_of_stages(config, cost, found[place // 2, place % 2])[stage] for place in places]
    end = memory_of_stages(config, cost, np.zeros((config.pp, 8), np.int64))[stage]
    return np.append(seconds, simulation.makespan / 1e6), [*held, end]


def _peak_snapshots(plan: Plan, chunks: Chunks, config: PlanConfig, held: MemoryRates) -> tuple[Int64Array, Int64Array]:
    """Peak snapshot of each stage over all steps and ranks, int64 [pp, 8], and its step * dp + rank, int64 [pp]."""
    actions = _actions(plan, np.diff(chunks.rank_chunks), config)
    return highest_peak(peak_snapshots(chunks, actions, held), held)


def _actions(plan: Plan, sizes: Int64Array, config: PlanConfig) -> Actions:
    """All actions of a plan whose ranks have `sizes` chunks, int64 [num_steps * dp]."""
    path = plan.path / "schedule.parquet"
    rows = ScheduleColumns.of(read_table(path, SCHEDULE))
    place = (rows.step.astype(np.int64) * config.dp + rows.dp_rank) * config.pp + rows.stage
    if not np.array_equal(place, np.arange(sizes.size * config.pp)):
        raise DataError("a stage has no row or two, or they are not sorted", where=str(path), hint=VALIDATE_HINT)
    most = np.repeat(np.repeat(sizes, config.pp), np.diff(rows.actions))
    is_known = (rows.op < len(OPS)) & (rows.chunk_id >= 0) & (rows.chunk_id < most)
    is_known &= (rows.virtual_stage >= 0) & (rows.virtual_stage < config.virtual_stages)
    if not is_known.all():
        row = int(np.searchsorted(rows.actions, np.argmin(is_known), side="right")) - 1
        where = f"{path}, step {rows.step[row]}, rank {rows.dp_rank[row]}, stage {rows.stage[row]}"
        raise DataError("an action is not of this step", where=where, hint=VALIDATE_HINT)
    return Actions(rows.op.astype(np.int8), rows.chunk_id, rows.virtual_stage, rows.actions)
