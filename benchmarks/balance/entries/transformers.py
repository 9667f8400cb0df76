"""transformers: `BatchRebalanceSampler`, with as many micro-batches as the cap asks for on average."""

from transformers.trainer_pt_utils import BatchRebalanceSampler

from benchmarks.balance.instances import Step
from benchmarks.balance.scoring import Plan

TRACK, PACKAGE = "whole", "transformers"


def plan(step: Step) -> Plan:
    """Every rank makes the whole step and yields its own part; here it is asked for the parts of all."""
    count = -(-sum(step.lengths) // (step.ranks * step.cap))
    size = len(step.lengths)
    sampler = BatchRebalanceSampler(step.lengths, size, step.ranks, count, shuffle=False)
    by_rank = sampler._assign(list(range(size)), step.lengths)
    return [[by_rank[rank][index] for rank in range(step.ranks)] for index in range(count)]
