"""Megatron Core: `BalancedCPScheduler`, its first rule, as many ranks for a sequence as have room for it."""

from types import SimpleNamespace

from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

from benchmarks.balance.instances import Step
from benchmarks.balance.scoring import Plan

TRACK, PACKAGE = "shared", "megatron.core"


def plan(step: Step) -> Plan:
    """Plan rounds. Ranks run the sequences of one in turn; here those with the same ranks together, up to the cap."""
    scheduler = BalancedCPScheduler(step.cap, SimpleNamespace(size=lambda: step.ranks))
    micro_batches: Plan = []
    for ranks in scheduler.get_groups_and_subsamples(list(enumerate(step.lengths)), None)[1]:
        first = len(micro_batches)
        for sequence in dict.fromkeys(each for rank in ranks for each in rank):
            own = [rank for rank, sequences in enumerate(ranks) if sequence in sequences]
            for batch in micro_batches[first:]:
                together = batch[own[0]]
                tokens = sum(step.lengths[each] for each in (*together, sequence))
                if all(batch[rank] == together for rank in own) and tokens <= step.cap * len(own):
                    break
            else:
                batch = [[] for _ in range(step.ranks)]
                micro_batches.append(batch)
            for rank in own:
                batch[rank] = [*batch[rank], sequence]
    return micro_batches
