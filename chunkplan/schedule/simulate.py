"""How long a rank's schedule takes: every action starts when its stage is free and what it waits for is there."""

from __future__ import annotations

from dataclasses import dataclass

from chunkplan.arrays import Int64Array
from chunkplan.cost.flops import BACKWARD
from chunkplan.planfile.order import BACKWARDS, FORWARDS, execution_order
from chunkplan.schedule.actions import StageActions


@dataclass(frozen=True)
class Simulation:
    """Times in the unit of the costs: the end of every action by stage, when each stage is done, when all are."""

    ends: list[list[int]]
    stage_end: list[int]
    makespan: int


def simulate(stages: list[StageActions], forward: Int64Array) -> Simulation:
    """Simulate `stages`; `forward` [num_chunks] is the time of a chunk's forward on one stage. Links take no time."""
    pp = len(stages)
    duration = forward.tolist()
    forward_end: dict[tuple[int, int], int] = {}
    backward_end: dict[tuple[int, int], int] = {}
    clock = [0] * pp
    ends: list[list[int]] = [[] for _ in stages]
    for stage, position in execution_order([[(op, chunk_id, 0) for op, chunk_id in actions] for actions in stages]):
        op, chunk_id = stages[stage][position]
        if op in BACKWARDS:
            start = max(clock[stage], backward_end.get((chunk_id, stage + 1), 0))
            clock[stage] = backward_end[chunk_id, stage] = start + BACKWARD * duration[chunk_id]
        elif op in FORWARDS:
            start = max(clock[stage], forward_end.get((chunk_id, stage - 1), 0))
            clock[stage] = forward_end[chunk_id, stage] = start + duration[chunk_id]
        else:
            clock[stage] += duration[chunk_id]  # recompute, local to the stage
        ends[stage].append(clock[stage])
    return Simulation(ends=ends, stage_end=list(clock), makespan=max(clock))
