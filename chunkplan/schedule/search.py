"""Searches for the order of a rank's chunks on its pipeline: which chunk runs when on which stage.

State-aware 1F1B (ChunkFlow, arXiv 2503.02356) runs chunks in the order they come and warms every stage up by rule.
Better orders exist for the same chunks; memory is their price, and may be bounded. The answer is never slower than
state-aware 1F1B where that fits, and the same on every machine, as effort is counted, not timed.

Chunks A and B are standalone, C and D the parts of one sequence; K = 2, time goes right. Capitals are forwards, small
letters backwards. State-aware 1F1B takes 46 for them, this 42:

    s0 |AABBCCDD............aaaa..bbbb....ddddcccc|
    s1 |..AABBCCDD......aaaa..bbbb....ddddcccc....|
    s2 |....AABBCCDDaaaa..bbbb....ddddcccc........|
    s3 |......AAaaaaBBbbbbCCDDddddcccc............|
"""

from __future__ import annotations

from typing import NamedTuple

from chunkplan.cost.durations import ChunkTimes
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import Actions, empty_actions
from chunkplan.schedule.bounds import jobs_of, makespan_bound
from chunkplan.schedule.holdings import peak_retained
from chunkplan.schedule.local_search import local_search
from chunkplan.schedule.search_small import search_small
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.state_aware_1f1b import state_aware_1f1b

#: The local search schedules as many actions, at most, so that it takes a fraction of a second for a rank, about the
#: same whatever its chunks and stages.
_ACTIONS = 2_000_000

#: Up to so many (chunk, stage) pairs CP-SAT goes on after fewer actions, most often to a proven optimum, for as many
#: deterministic seconds at most, so that few chunks may take longer than many.
_PAIRS, _FEWER_ACTIONS, _EFFORT = 40, 200_000, 1.0

#: What is as near to the lower bound is good enough.
_GAP = 0.005


class Found(NamedTuple):
    """A schedule, when it is done, and the time that no other one of the same chunks under the same memory beats."""

    actions: Actions
    makespan: int
    lower_bound: int


def search(chunks: Chunks, times: ChunkTimes, pp: int, memory_tokens: int | None) -> Found:
    """The fastest schedule found: orders of forwards and of backwards, and how they interleave on every stage.

    Args:
        memory_tokens: tokens whose activations a stage may retain at any time, no fewer than `least_memory`; without,
            only K bounds them.
    """
    memory = max(int(chunks.num_tokens.sum()) if memory_tokens is None else memory_tokens, 1)
    actions, template = (empty_actions(chunks.keeps_activations, pp, pp, False) for _ in range(2))
    is_small = chunks.keeps_activations.size * pp <= _PAIRS
    makespan = int(local_search(chunks, times, pp, memory, _FEWER_ACTIONS if is_small else _ACTIONS, actions))
    state_aware_1f1b(chunks, pp, template)
    template_end = int(simulate(chunks, template, times, pp).max())
    if template_end < makespan and peak_retained(chunks, template).max() <= memory:
        actions, makespan = template, template_end
    lower_bound = int(makespan_bound(chunks, times, jobs_of(chunks, times, pp), memory))
    if is_small and makespan - lower_bound > _GAP * lower_bound:
        return Found(*search_small(chunks, times, pp, memory, actions, lower_bound, _EFFORT))
    return Found(actions, makespan, lower_bound)
