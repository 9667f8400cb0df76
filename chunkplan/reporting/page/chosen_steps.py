"""Which steps of a plan a page draws, and which of their ranks: enough to see what there is, few enough to look at."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from chunkplan.planfile.places import find_step
from chunkplan.planfile.plan import Plan, PlanStep
from chunkplan.schedule.simulated import Simulation
from chunkplan.simulation import simulate_step

#: Stages of ranks of a step, actions of a step, and of all steps; a rank is drawn whole, the first even if it has more.
_MOST_ROWS, _MOST_ACTIONS, _MOST_IN_ALL = 64, 4_000, 20_000


@dataclass(frozen=True, eq=False)
class DrawnStep:
    """A step with what its ranks do, by dp_rank; of many ranks those that are done last. `why` it is drawn."""

    step: PlanStep
    why: str
    ranks: dict[int, Simulation]


def drawn_steps(plan: Plan, steps: pl.DataFrame, first: int | None) -> tuple[list[DrawnStep], list[int]]:
    """The steps to draw, and those that are too large for it.

    `steps` is `per_step` of the plan. `first` is a step to draw before all others, whatever it is like.

    Raises:
        UsageError: there is no step `first`.
        DataError: the plan is damaged.
    """
    drawn, left_out, room = [], [], _MOST_IN_ALL
    for number, reasons in _worth_a_look(steps, first).items():
        step = find_step(plan, number)
        ranks = _ranks(step, plan.config["pp"])
        num_actions = sum(len(done) for (rank, _), done in step.actions.items() if rank in ranks)
        if num_actions > room:
            left_out.append(number)
            continue
        room -= num_actions
        simulated = {rank: simulate_step(plan, step, rank) for rank in ranks}
        drawn.append(DrawnStep(step, ", ".join(reasons), simulated))
    return drawn, left_out


def _worth_a_look(steps: pl.DataFrame, first: int | None) -> dict[int, list[str]]:
    """Numbers of steps, those first that should be there by all means, and what is special about each."""
    time = pl.col("predicted_us")
    candidates = [("first", pl.col("step")), ("slowest", -time), ("median time", (time - time.median()).abs())]
    candidates += [("fastest", time), ("least full", pl.col("fill"))]
    if steps["heaviest_over_mean"].max() != 1:
        candidates.append(("least balanced", -pl.col("heaviest_over_mean")))
    if steps["recompute_share"].max() != 0:
        candidates.append(("most recomputed", -pl.col("recompute_share")))
    reasons: dict[int, list[str]] = {} if first is None else {first: ["asked for"]}
    for why, key in candidates:
        number = int(steps.sort(key, "step")["step"][0])
        reasons.setdefault(number, []).append(why)
    return reasons


def _ranks(step: PlanStep, pp: int) -> list[int]:
    """The ranks to draw, ascending: as many of those that are done last as there is room for, one at least."""
    ends = {rank: max(step.schedule_us[rank, stage] for stage in range(pp)) for rank in step.chunks}
    taken: list[int] = []
    num_actions = 0
    for rank in sorted(ends, key=lambda rank: (-ends[rank], rank)):
        num_actions += sum(len(step.actions[rank, stage]) for stage in range(pp))
        if taken and ((len(taken) + 1) * pp > _MOST_ROWS or num_actions > _MOST_ACTIONS):
            break
        taken.append(rank)
    return sorted(taken)
