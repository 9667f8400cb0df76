"""Which steps of a plan a page draws, and which of their ranks: enough to see what there is, few enough to look at."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from chunkplan.planfile.places import find_step
from chunkplan.planfile.plan import Plan, PlanStep
from chunkplan.schedule.simulated import Simulation
from chunkplan.simulation import simulate_ranks

#: Stages of ranks of a step; its actions: one rank is there even if it has more, of which the first are drawn.
_MOST_ROWS, MOST_ACTIONS = 64, 5_000

#: Of so few steps all are drawn.
_FEW_STEPS = 8


@dataclass(frozen=True, eq=False)
class DrawnStep:
    """A step with what its ranks do, by dp_rank; of many ranks those that are done last. `why` it is drawn, if there is
    more to say than that it is one of few."""

    step: PlanStep
    why: str
    ranks: dict[int, Simulation]

    @property
    def label(self) -> str:
        """Name the step by its number and why it is drawn."""
        return f"step {self.step.step:,}" + (f": {self.why}" if self.why else "")

    @property
    def num_actions(self) -> int:
        """Count the actions of all ranks that are here; see `MOST_ACTIONS`."""
        return sum(int(simulation.actions.ops.size) for simulation in self.ranks.values())


def drawn_steps(plan: Plan, steps: pl.DataFrame, median: int, first: int | None) -> list[DrawnStep]:
    """Choose the steps to draw.

    `steps` is `per_step` of the plan, `median` its `StepTimeSummary.median_step`. `first` is a step to draw before all
    others, whatever it is like.

    Raises:
        UsageError: there is no step `first`.
        DataError: the plan is damaged.
    """
    drawn = []
    for number, reasons in _worth_a_look(steps, median, first).items():
        step = find_step(plan, number)
        simulated = simulate_ranks(plan, step, _ranks(step, plan.config.pp))
        drawn.append(DrawnStep(step, ", ".join(reasons), simulated))
    return drawn


def _worth_a_look(steps: pl.DataFrame, median: int, first: int | None) -> dict[int, list[str]]:
    """Return numbers of steps, those first that should be there by all means, and what is special about each."""
    time = pl.col("predicted_us")
    candidates = [("first", pl.col("step")), ("slowest", -time), ("median time", pl.col("step") != median)]
    candidates += [("fastest", time), ("least full", pl.col("fill"))]
    if steps["heaviest_over_mean"].max() != 1:
        candidates.append(("least balanced", -pl.col("heaviest_over_mean")))
    if steps["recompute_share"].max() != 0:
        candidates.append(("most recomputed", -pl.col("recompute_share")))
    reasons: dict[int, list[str]] = {} if first is None else {first: ["asked for"]}
    for why, key in candidates if steps.height > 1 else ():
        number = int(steps.sort(key, "step")["step"][0])
        reasons.setdefault(number, []).append(why)
    if steps.height <= _FEW_STEPS:
        for number in steps["step"].to_list():
            reasons.setdefault(number, [])
    return reasons


def _ranks(step: PlanStep, pp: int) -> list[int]:
    """Choose the ranks to draw, ascending: as many of those that are done last as there is room for, one at least."""
    ends = {rank: max(step.schedule_us[rank, stage] for stage in range(pp)) for rank in step.chunks}
    taken: list[int] = []
    num_actions = 0
    for rank in sorted(ends, key=lambda rank: (-ends[rank], rank)):
        num_actions += sum(len(step.actions[rank, stage]) for stage in range(pp))
        if taken and ((len(taken) + 1) * pp > _MOST_ROWS or num_actions > MOST_ACTIONS):
            break
        taken.append(rank)
    return sorted(taken)
