"""chunkplan's `plan_rounds`, which its scheduler for Megatron Core calls."""

import numpy as np

from benchmarks.balance.instances import Step
from benchmarks.balance.scoring import Plan
from chunkplan.planning.rounds import group_sizes, group_times, plan_rounds

TRACK, PACKAGE = "shared", "chunkplan"


def plan(step: Step) -> Plan:
    """Plan groups of ranks that may change with every micro-batch."""
    tokens = np.array(step.lengths)
    times = group_times(step.cost, tokens, group_sizes(step.ranks))
    found = plan_rounds(tokens, times, step.ranks, step.cap, round_time=step.cost.chunk_ns, stages=step.pp)
    assert found is not None
    return found
