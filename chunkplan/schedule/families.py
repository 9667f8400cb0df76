"""The schedules there are, by name, and the schedules of many ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.errors import UsageError
from chunkplan.schedule.actions import Actions, RankChunks, empty_actions, rank_of
from chunkplan.schedule.retained import peak_retained
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.templates import ALGORITHM2, INTERLEAVED, ONE_FORWARD_ONE_BACKWARD, follow_template

#: Name -> the rule it follows, the same for all ranks.
_TEMPLATES = {"algorithm2": ALGORITHM2, "1f1b": ONE_FORWARD_ONE_BACKWARD, "interleaved": INTERLEAVED}

#: Name -> what looks for the best schedule of one rank, on so many stages and within so many tokens: (actions, bound).
_SEARCHES: dict[str, Callable[[RankChunks, int, int | None], tuple[Actions, int]]] = {
    "zero-bubble": lambda rank, pp, memory_tokens: (_zero_bubble(rank, pp), 0),
    "search": lambda rank, pp, memory_tokens: _search(rank, pp, memory_tokens),
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
    rank_chunks: Int64Array,
    chunks: RankChunks,
    pp: int,
    schedule: str,
    memory_tokens: int | None,
    place: Callable[[int], str],
) -> Scheduled:
    """Schedule the chunks of many ranks, each for itself.

    Args:
        rank_chunks: int64 [num_ranks + 1], where each rank's chunks begin in the arrays of `chunks`.
        schedule: one of `SCHEDULES`.
        memory_tokens: what a stage may retain; only "search" makes use of it, others are refused where they do not fit.
        place: names a rank, for errors.

    Raises:
        UsageError: a rank cannot be scheduled within `memory_tokens`.
    """
    if schedule in _TEMPLATES:
        lower_bound = np.zeros(rank_chunks.size - 1, np.int64)
        actions, ends, retained = follow_template(_TEMPLATES[schedule], rank_chunks, chunks, pp)
    else:
        actions, ends, retained, lower_bound = _one_by_one(schedule, rank_chunks, chunks, pp, memory_tokens, place)
    retained = -(-retained // (chunks.durations.shape[1] // pp))
    if memory_tokens is not None:
        _refuse_too_large(retained, pp, schedule, memory_tokens, place)
    assert (ends >= 0).all(), "a schedule in which stages wait for each other for ever"
    return Scheduled(actions, ends, ends[actions.stages[1:] - 1], retained, lower_bound)


def _one_by_one(
    schedule: str,
    rank_chunks: Int64Array,
    chunks: RankChunks,
    pp: int,
    memory_tokens: int | None,
    place: Callable[[int], str],
) -> tuple[Actions, Int64Array, Int64Array, Int64Array]:
    """Actions, ends, peaks of retained tokens, and lower bounds, see `Scheduled`."""
    found, ends, retained, lower_bound = [], [], [], np.zeros(rank_chunks.size - 1, np.int64)
    for index in range(rank_chunks.size - 1):
        rank = rank_of(chunks, rank_chunks[index], rank_chunks[index + 1])
        try:
            actions, lower_bound[index] = _SEARCHES[schedule](rank, pp, memory_tokens)
        except UsageError as error:
            raise UsageError(error.message, where=place(index), hint=error.hint) from error
        found.append(actions)
        ends.append(simulate(actions, rank.durations, rank.link))
        retained.append(peak_retained(actions, rank.num_tokens, 1))
    sizes = np.array([actions.ops.size for actions in found])
    firsts = np.cumsum(sizes) - sizes
    stages = [actions.stages[:-1] + first for actions, first in zip(found, firsts, strict=True)]
    together = Actions(
        np.concatenate([actions.ops for actions in found]),
        np.concatenate([actions.chunk_ids for actions in found]),
        np.concatenate([actions.virtual_stages for actions in found]),
        np.append(np.concatenate(stages), sizes.sum()),
    )
    return together, np.concatenate(ends), np.concatenate(retained), lower_bound


def _zero_bubble(rank: RankChunks, pp: int) -> Actions:
    from chunkplan.schedule.zero_bubble import zero_bubble

    actions = empty_actions(rank.keeps, pp, pp, True)
    zero_bubble(rank, pp, actions)
    return actions


def _search(rank: RankChunks, pp: int, memory_tokens: int | None) -> tuple[Actions, int]:
    from chunkplan.schedule.search import search

    found = search(rank, pp, memory_tokens)
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
