"""verl: sequences to ranks by `get_seqlen_balanced_partitions`, then micro-batches by `rearrange_micro_batches`."""

import torch
from tensordict import TensorDict
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, rearrange_micro_batches

from benchmarks.balance.instances import Step
from benchmarks.balance.scoring import Plan

TRACK, PACKAGE = "whole", "verl"


def plan(step: Step) -> Plan:
    """As its trainers: as many sequences on each rank, then as many micro-batches as the rank with most needs."""
    ranks = get_seqlen_balanced_partitions(step.work, step.ranks, equal_size=True)
    batches = [_batch([step.lengths[each] for each in rank]) for rank in ranks]
    least = step.pp
    while True:
        found = [rearrange_micro_batches(batch, step.cap, min_num_micro_batch=least)[1] for batch in batches]
        if min(map(len, found)) == max(map(len, found)):
            break
        least = max(map(len, found))
    return [
        [[rank[place] for place in micro_batches[index]] for rank, micro_batches in zip(ranks, found, strict=True)]
        for index in range(len(found[0]))
    ]


def _batch(lengths: list[int]) -> TensorDict:
    """Nested tensors of these lengths."""
    rows = torch.nested.as_nested_tensor([torch.zeros(each, dtype=torch.int8) for each in lengths], layout=torch.jagged)
    return TensorDict({"input_ids": rows}, batch_size=len(lengths))
