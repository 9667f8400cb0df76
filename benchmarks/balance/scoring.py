"""Times and faults of a plan: when its last rank is done, beside a proved bound, and what it breaks."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from benchmarks.balance.instances import Step
from chunkplan.planning.whole import fewest_micro_batches

#: The ids of the sequences of each rank in each micro-batch: `[micro_batches][ranks]` lists. Ranks share a sequence
#: that several have in one micro-batch; such ranks have the same sequences.
Plan = list[list[list[int]]]


class Score(NamedTuple):
    """Of one plan: time over the bound where ranks wait after each round, and after each step; what it breaks."""

    after_rounds: float
    after_step: float
    broken_caps: int
    dropped_tokens: int
    unequal_counts: int

    @property
    def is_valid(self) -> bool:
        """True if a trainer can take it: all tokens are there, and no micro-batch is above the cap."""
        return not self.broken_caps and not self.dropped_tokens


def score(step: Step, plan: Plan) -> Score:
    """Score a plan."""
    tokens = np.array(step.lengths)
    groups = [_groups(micro_batch) for micro_batch in plan]
    times = [
        [step.time(tokens[list(sequences)].tolist(), len(ranks)) for sequences, ranks in each.items()]
        for each in groups
    ]
    lower = bounds(step)
    used = {sequence for each in groups for sequences in each for sequence in sequences}
    counts = [sum(bool(micro_batch[rank]) for micro_batch in plan) for rank in range(step.ranks)]
    caps = sum(
        int(tokens[list(sequences)].sum()) > step.cap * len(ranks)
        for each in groups
        for sequences, ranks in each.items()
    )
    return Score(
        _makespan(step, [{(): list(range(step.ranks))}] * len(plan), [[max(each)] for each in times]) / lower[0],
        _makespan(step, groups, times) / lower[1],
        caps,
        int(tokens.sum() - tokens[list(used)].sum()),
        max(counts) - min(counts),
    )


@cache
def bounds(step: Step) -> tuple[float, float]:
    """No plan without a fault is done sooner: waiting after each round, and at the end.

    The busiest rank has at least an even share of the work, in as many micro-batches as every other; a pipeline takes
    their sum, and its longest micro-batch, which is no shorter than their mean, once more for each further stage. All
    ranks wait for the longest sequence where they do so after each round. Where none is shared, one rank has the
    longest, one has k + 1 of the longest k * ranks + 1, and as many rounds as it takes have a sequence that fills over
    half of the cap; where some must be shared, slices have work of their own.
    """
    fixed, tokens = step.fixed_ns, np.sort(np.array(step.lengths))[::-1]
    need = -(-tokens // step.cap) if step.track == "shared" else np.ones_like(tokens)
    alone = [step.time([length], size, exchanges=False) for length, size in zip(tokens.tolist(), need, strict=True)]
    work = (np.array(alone) - fixed) * need
    several = list(range(step.ranks, tokens.size, step.ranks)) if step.track == "whole" else []
    loads = [work.sum() / step.ranks, *(work[stop - k : stop + 1].sum() for k, stop in enumerate(several, 1))]
    sizes = range(need[0], step.ranks + 1) if step.track == "shared" else (1,)
    longest = min(step.time([int(tokens[0])], size, exchanges=False) for size in sizes)
    fewest = -(-int(tokens.sum()) // step.cap) if step.track == "shared" else fewest_micro_batches(tokens, step.cap)
    counts = np.arange(-(-fewest // step.ranks), max(tokens.size, fewest) + 1)
    by_itself = work[tokens > step.cap // 2][:: step.ranks].sum() if step.track == "whole" else 0.0
    found = []
    for load, least in ((max(*loads, by_itself), longest), (max(loads), 0.0)):
        sums = load + fixed * counts
        found.append(float((sums + (step.pp - 1) * np.maximum(sums / counts, least)).min()) / step.pp)
    return max(found[0], longest), max(found[1], longest)


def _groups(micro_batch: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """Sequences of a micro-batch that are together, and the ranks that have them."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, sequences in enumerate(micro_batch):
        if sequences:
            groups.setdefault(tuple(sorted(sequences)), []).append(rank)
    return groups


def _makespan(step: Step, groups: list[dict[tuple[int, ...], list[int]]], times: list[list[float]]) -> float:
    """When the last rank is done: micro-batches pass the stages in order, ranks of a group begin together."""
    done = np.zeros((step.pp, step.ranks))
    for micro_batch, durations in zip(groups, times, strict=True):
        for ranks, duration in zip(micro_batch.values(), durations, strict=True):
            ready = 0.0
            for stage in range(step.pp):
                ready = max(ready, float(done[stage, ranks].max())) + duration / step.pp
                done[stage, ranks] = ready
    return float(done.max())
