"""chunkplan's `plan_step`: whole sequences, as many micro-batches on each rank."""

from benchmarks.balance.instances import Step
from benchmarks.balance.scoring import Plan
from chunkplan import plan_step
from chunkplan.errors import DataError

TRACK, PACKAGE = "whole", "chunkplan"


def plan(step: Step) -> Plan:
    """Plan in as few micro-batches as hold the sequences; on a pipeline also in more, and take the fastest."""
    found = _plan(step, "fewest")
    fewest = len(found)
    for count in (fewest + 1, fewest + 2, fewest + 3, 2 * fewest, 4 * fewest) if step.pp > 1 else ():
        if count <= len(step.lengths) // step.ranks:
            try:
                found = min(found, _plan(step, count), key=lambda each: _time(step, each))
            except DataError:  # there is no room
                continue
    return found


def _plan(step: Step, micro_batches: int | str) -> Plan:
    found = plan_step(
        step.lengths, dp=step.ranks, cap=step.cap, cost=step.cost, pp=step.pp, cp="off", split="none",
        micro_batches=micro_batches, schedule="1f1b" if step.pp > 1 else "algorithm2",
    )  # fmt: skip
    return [list(each) for each in zip(*map(found.sequences, range(step.ranks)), strict=True)]


def _time(step: Step, plan: Plan) -> float:
    """When the last rank is done that waits after each micro-batch, and when without, on a pipeline in order."""
    times = [[sum(step.work[each] for each in rank) + step.fixed_ns for rank in batch] for batch in plan]
    longest = [max(each) for each in times]
    ranks = zip(*times, strict=True)
    return sum(longest) + (step.pp - 1) * max(longest) + max(sum(rank) + (step.pp - 1) * max(rank) for rank in ranks)
