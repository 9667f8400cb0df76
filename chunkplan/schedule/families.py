"""The schedules there are, by name, and the schedules of many ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.cost.durations import ChunkTimes
from chunkplan.errors import UsageError
from chunkplan.layers import V_SHAPED
from chunkplan.planfile.chunks import Chunks, chunks_of_rank
from chunkplan.schedule.actions import Actions, empty_actions, join_actions, times_of_rank
from chunkplan.schedule.holdings import peak_retained
from chunkplan.schedule.meetings import simulate_steps
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.templates import ALGORITHM2, INTERLEAVED, ONE_FORWARD_ONE_BACKWARD, follow_template

#: Name -> the rule it follows, the same for all ranks.
_TEMPLATES = {"algorithm2": ALGORITHM2, "1f1b": ONE_FORWARD_ONE_BACKWARD, "interleaved": INTERLEAVED}

#: Name -> what looks for the best schedule of one rank, on so many stages and within so many tokens: (actions, bound).
_SEARCHES: dict[str, Callable[[Chunks, ChunkTimes, int, int | None], tuple[Actions, int]]] = {
    "zero-bubble": lambda chunks, times, pp, memory_tokens: (_zero_bubble(chunks, times, pp), 0),
    "zero-bubble-v": lambda chunks, times, pp, memory_tokens: (_zero_bubble_v(chunks, times, pp), 0),
    "search": lambda chunks, times, pp, memory_tokens: _search(chunks, times, pp, memory_tokens),
}

#: All by name.
SCHEDULES = (*_TEMPLATES, *_SEARCHES)


class Scheduled(NamedTuple):
    """Actions of all stages of some ranks, stage after stage.

    `ends` int64 [num_actions]. Of each stage, int64 [num_ranks * pp]: `stage_end`, when it is done, and
    `peak_retained_tokens`, the most tokens whose activations it retains at once (a virtual stage counts as its share of
    the stage's layers). `lower_bound` int64 [num_ranks]: no order of the same chunks under the same memory is faster; 0
    where none was looked for.
    """

    actions: Actions
    ends: Int64Array
    stage_end: Int64Array
    peak_retained_tokens: Int64Array
    lower_bound: Int64Array


def schedule_ranks(
    chunks: Chunks,
    times: ChunkTimes,
    pp: int,
    schedule: str,
    memory_tokens: int | None,
    place: Callable[[int], str],
    dp: int = 1,
) -> Scheduled:
    """Schedule the chunks of many ranks, each for itself; those that share chunks meet (see `simulate_steps`).

    Args:
        schedule: one of `SCHEDULES`.
        memory_tokens: what a stage may retain; only "search" makes use of it, others are refused where they do not fit.
        place: names a rank, for errors.
        dp: ranks of a step, where they may share chunks.

    Raises:
        UsageError: a rank cannot be scheduled within `memory_tokens`.
    """
    if schedule in _TEMPLATES:
        lower_bound = np.zeros(chunks.rank_chunks.size - 1, np.int64)
        actions, ends, retained = follow_template(_TEMPLATES[schedule], chunks, times, pp)
    else:
        actions, ends, retained, lower_bound = _one_by_one(schedule, chunks, times, pp, memory_tokens, place)
    if np.any(chunks.cp_size > 1):
        ends = simulate_steps(chunks, actions, times, dp, pp)
    retained = -(-retained // (times.durations.shape[1] // pp))
    if memory_tokens is not None:
        _refuse_too_large(retained, pp, schedule, memory_tokens, place)
    assert (ends >= 0).all(), "a schedule in which stages wait for each other for ever"
    return Scheduled(actions, ends, ends[actions.stages[1:] - 1], retained, lower_bound)


def _one_by_one(
    schedule: str,
    chunks: Chunks,
    times: ChunkTimes,
    pp: int,
    memory_tokens: int | None,
    place: Callable[[int], str],
) -> tuple[Actions, Int64Array, Int64Array, Int64Array]:
    """Actions, ends, peaks of retained tokens, and lower bounds, see `Scheduled`."""
    found, ends, retained, lower_bound = [], [], [], np.zeros(chunks.rank_chunks.size - 1, np.int64)
    for rank in range(lower_bound.size):
        rank_chunks, rank_times = chunks_of_rank(chunks, rank), times_of_rank(chunks, times, rank)
        try:
            actions, lower_bound[rank] = _SEARCHES[schedule](rank_chunks, rank_times, pp, memory_tokens)
        except UsageError as error:
            raise UsageError(error.message, where=place(rank), hint=error.hint) from error
        found.append(actions)
        ends.append(simulate(actions, rank_times, schedule in V_SHAPED))
        retained.append(peak_retained(rank_chunks, actions))
    return join_actions(found), np.concatenate(ends), np.concatenate(retained), lower_bound


def _zero_bubble(chunks: Chunks, times: ChunkTimes, pp: int) -> Actions:
    from chunkplan.schedule.zero_bubble import zero_bubble

    actions = empty_actions(chunks.keeps_activations, pp, pp, True)
    zero_bubble(chunks, times, pp, actions)
    return actions


def _zero_bubble_v(chunks: Chunks, times: ChunkTimes, pp: int) -> Actions:
    from chunkplan.schedule.zero_bubble_v import zero_bubble_v

    actions = empty_actions(chunks.keeps_activations, pp, 2 * pp, True)
    zero_bubble_v(chunks, times, pp, actions)
    return actions


def _search(chunks: Chunks, times: ChunkTimes, pp: int, memory_tokens: int | None) -> tuple[Actions, int]:
    from chunkplan.schedule.search import search

    found = search(chunks, times, pp, memory_tokens)
    return found.actions, found.lower_bound


def _refuse_too_large(
    retained: Int64Array, pp: int, schedule: str, memory_tokens: int, place: Callable[[int], str]
) -> None:
    over = np.flatnonzero(retained > memory_tokens)
    if over.size:
        raise UsageError(
            f"{schedule} holds activations of {retained[over[0]]:,} tokens on stage {over[0] % pp}, "
            f"memory-tokens allows {memory_tokens:,}",
            where=place(int(over[0]) // pp),
            hint="schedule search looks for an order that fits; a smaller k or chunk-size holds less",
        )
