"""The schedules there are, by name, and the schedules of many ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.cost.durations import ChunkTimes
from chunkplan.errors import UsageError
from chunkplan.layers import FAMILIES
from chunkplan.planfile.chunks import Chunks, chunks_of_rank, chunks_of_ranks
from chunkplan.schedule.actions import (
    Actions,
    Int8Array,
    actions_of_rank,
    empty_actions,
    join_actions,
    times_of_rank,
    times_of_ranks,
)
from chunkplan.schedule.alignment import align_steps
from chunkplan.schedule.bounds import least_memory
from chunkplan.schedule.holdings import peak_retained
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.templates import ALGORITHM2, INTERLEAVED, ONE_FORWARD_ONE_BACKWARD, follow_template

#: Name -> the rule it follows, the same for all ranks.
_TEMPLATES = {"algorithm2": ALGORITHM2, "1f1b": ONE_FORWARD_ONE_BACKWARD, "interleaved": INTERLEAVED}

#: Name -> what looks for the best schedule of one rank, on so many stages and within so many tokens: (actions, bound).
_SEARCHES: dict[str, Callable[[Chunks, ChunkTimes, int, int | None], tuple[Actions, int]]] = {
    "zero-bubble-v": lambda chunks, times, pp, memory_tokens: (_zero_bubble_v(chunks, times, pp), 0),
    "search": lambda chunks, times, pp, memory_tokens: _search(chunks, times, pp, memory_tokens),
}

#: What looks at all ranks of a step, and whether it splits backwards.
_OF_STEPS = {"auto": False, "zero-bubble": True}

#: Of so many ranks at most the actions that were found are kept, and when they are done, by what was asked; of each no
#: more than so many chunks times stages, which are a few dozen bytes each.
_KEPT, _KEPT_EACH = 4096, 512
_kept: dict[bytes, tuple[Actions, int]] = {}

#: All by name.
SCHEDULES = (*_TEMPLATES, *_OF_STEPS, *_SEARCHES)


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
    is_cancelled: Callable[[], bool] = lambda: False,
    meeting: Int8Array | None = None,
) -> Scheduled:
    """Schedule the chunks of many ranks, each for itself; those that share chunks meet (see `simulate`).

    Args:
        schedule: one of `SCHEDULES`.
        memory_tokens: what a stage may retain; "search", "auto" and "zero-bubble" make use of it, others are refused
            where they do not fit.
        place: names a rank, for errors.
        dp: ranks of a step: they may share chunks, and what they need is said together.
        is_cancelled: asked before each rank, where ranks are searched one by one.
        meeting: which ops the ranks of a step meet for, see `meeting_of`, None: for none. When actions end is then what
            `align` says; their order is the same.

    Raises:
        CancelledError: `is_cancelled()` was true while there was still a rank to search.
        UsageError: a rank cannot be scheduled within `memory_tokens`.
    """
    lower_bound = np.zeros(chunks.rank_chunks.size - 1, np.int64)
    if memory_tokens is not None:
        _refuse_too_little(chunks, memory_tokens, place, dp)
    if schedule in _TEMPLATES:
        actions = follow_template(_TEMPLATES[schedule], chunks, times, pp)
    else:
        found = []
        if schedule in _OF_STEPS:
            splits = _OF_STEPS[schedule]
            for first in range(0, lower_bound.size, dp):
                ranks = range(first, first + dp)
                found += _of_step(chunks, times, pp, memory_tokens, ranks, splits, is_cancelled)
        else:
            for rank in range(lower_bound.size):
                if is_cancelled():
                    raise CancelledError
                own = chunks_of_rank(chunks, rank), times_of_rank(chunks, times, rank)
                actions, lower_bound[rank] = _SEARCHES[schedule](*own, pp, memory_tokens)
                found.append(actions)
        actions = join_actions(found)
    placement = FAMILIES[schedule].placement._replace(virtual_stages=times.durations.shape[1] // pp)
    if meeting is not None:
        ends, _ = align_steps(chunks, actions, times, meeting, dp, pp, placement)
    else:
        ends = simulate(chunks, actions, times, pp, placement, dp)
    retained = -(-peak_retained(chunks, actions) // placement.virtual_stages)
    if memory_tokens is not None:
        _refuse_too_large(retained, pp, schedule, memory_tokens, place)
    assert (ends >= 0).all(), "a schedule in which stages wait for each other for ever"
    return Scheduled(actions, ends, ends[actions.stages[1:] - 1], retained, lower_bound)


def _of_step(
    chunks: Chunks,
    times: ChunkTimes,
    pp: int,
    memory_tokens: int | None,
    ranks: range,
    splits: bool,
    is_cancelled: Callable[[], bool],
) -> list[Actions]:
    """The actions of the ranks of a step: together where they share chunks, else one by one."""
    from chunkplan.schedule.auto import AS_TEMPLATE, auto, order_bound

    memory = AS_TEMPLATE if memory_tokens is None else memory_tokens
    step = chunks_of_ranks(chunks, ranks.start, ranks.stop)
    step_times = times_of_ranks(chunks, times, ranks.start, ranks.stop)
    if is_cancelled():
        raise CancelledError
    if np.any(step.cp_size > 1):
        # Ranks that lie side by side may end and begin with parts of one group.
        rank_of = np.repeat(np.arange(len(ranks), dtype=np.int32), np.diff(step.rank_chunks))
        apart = np.where(step.group_id < 0, -1, step.group_id * len(ranks) + rank_of).astype(np.int32)
        actions, _ = auto(step._replace(group_id=apart), step_times, pp, memory, 0, splits)
        return [actions_of_rank(actions, rank, pp) for rank in range(len(ranks))]
    # The others need be done no sooner than the one that is done last.
    own = [(chunks_of_rank(step, rank), times_of_rank(step, step_times, rank)) for rank in range(len(ranks))]
    bounds = [order_bound(*of_rank, pp, splits) for of_rank in own]
    enough, found = max(bounds), {}
    for rank in sorted(range(len(ranks)), key=lambda rank: -bounds[rank]):
        if is_cancelled():
            raise CancelledError
        found[rank], end = _auto(*own[rank], pp, memory, enough, splits)
        enough = max(enough, end)
    return [found[rank] for rank in range(len(ranks))]


def _auto(chunks: Chunks, times: ChunkTimes, pp: int, memory: int, enough: int, splits: bool) -> tuple[Actions, int]:
    """`auto`, which is not asked twice: of the Ks that `tune` tries, most ranks know no difference."""
    from chunkplan.schedule.auto import auto

    if times.durations[0].size > _KEPT_EACH:
        return auto(chunks, times, pp, memory, enough, splits)
    asked = blake2b(repr((pp, memory, enough, splits, times.durations.shape)).encode(), digest_size=16)
    for values in (*chunks, *times):
        asked.update(values.size.to_bytes(8))
        asked.update(values.tobytes())
    answer = _kept.get(asked.digest())
    if answer is None:
        if len(_kept) >= _KEPT:
            _kept.clear()
        _kept[asked.digest()] = answer = auto(chunks, times, pp, memory, enough, splits)
    return answer


def _zero_bubble_v(chunks: Chunks, times: ChunkTimes, pp: int) -> Actions:
    from chunkplan.schedule.zero_bubble_v import zero_bubble_v

    actions = empty_actions(chunks.keeps_activations, pp, 2 * pp, True)
    zero_bubble_v(chunks, times, pp, actions)
    return actions


def _search(chunks: Chunks, times: ChunkTimes, pp: int, memory_tokens: int | None) -> tuple[Actions, int]:
    from chunkplan.schedule.search import search

    found = search(chunks, times, pp, memory_tokens)
    return found.actions, found.lower_bound


def _refuse_too_little(chunks: Chunks, memory_tokens: int, place: Callable[[int], str], dp: int) -> None:
    """Refuse memory that no order of a rank's chunks fits; of the first such step, the rank that needs most is said."""
    num_ranks = chunks.rank_chunks.size - 1
    least = np.array([least_memory(chunks_of_rank(chunks, rank)) for rank in range(num_ranks)])
    over = np.flatnonzero(least > memory_tokens)
    if over.size:
        first = int(over[0]) // dp * dp
        rank = first + int(np.argmax(least[first : first + dp]))
        who = "all ranks of the step" if dp > 1 else "this rank"
        raise UsageError(
            f"a stage has to hold activations of {least[rank]:,} tokens at once, memory-tokens allows "
            f"{memory_tokens:,}",
            where=place(rank),
            hint=f"--memory-tokens {least[rank]} is the least for {who}, no rank takes more than K times "
            "ChunkSize; a smaller --k or --chunk-size holds less",
        )


def _refuse_too_large(
    retained: Int64Array, pp: int, schedule: str, memory_tokens: int, place: Callable[[int], str]
) -> None:
    over = np.flatnonzero(retained > memory_tokens)
    if over.size:
        # Memory that no order fits was refused before, so that one of them does.
        other = "use schedule auto, which fits" if schedule in ("1f1b", "interleaved", "zero-bubble-v") else ""
        other += " (without --virtual-stages)" if schedule == "interleaved" else ""
        raise UsageError(
            f"{schedule} holds activations of {retained[over[0]]:,} tokens on stage {over[0] % pp}, "
            f"memory-tokens allows {memory_tokens:,}",
            where=place(int(over[0]) // pp),
            hint=f"{other}; or a smaller --k or --chunk-size holds less".removeprefix("; or "),
        )
