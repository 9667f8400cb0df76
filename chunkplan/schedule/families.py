"""Schedules by name, and the schedules of many ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from chunkplan.arrays import Int8Array, Int64Array
from chunkplan.cost.durations import ChunkTimes
from chunkplan.errors import UsageError
from chunkplan.layers import family_of
from chunkplan.planfile.chunks import Chunks, chunks_of_rank, chunks_of_ranks
from chunkplan.schedule.actions import (
    Actions,
    empty_actions,
    join_actions,
    times_of_ranks,
)
from chunkplan.schedule.bounds import least_memory
from chunkplan.schedule.holdings import peak_retained
from chunkplan.schedule.simulate import simulate
from chunkplan.schedule.slots import assign_slots, ends_in_slots, slot_ops_of
from chunkplan.schedule.templates import TEMPLATES, follow_template

#: Schedules that order all ranks of a step together, and whether they split backwards.
_SPLITS_BACKWARD = {"auto": False, "zero-bubble": True}

#: Most steps in the cache, and most chunks of a rank times stages of a step in it, which are a few dozen bytes each.
_CACHE_STEPS, _CACHE_STEP_SIZE = 512, 512
_cache: dict[bytes, Actions] = {}

#: Columns of chunks, beside their times, that determine their order: the key of the cache.
_CACHE_COLUMNS = ("rank_chunks", "group_id", "num_tokens", "keeps_activations", "cp_first_rank", "cp_size")


class Scheduled(NamedTuple):
    """Actions of all stages of some ranks, stage after stage.

    `ends` int64 [num_actions]. Of each stage, int64 [num_ranks * pp]: `stage_end`, when it is done, and
    `peak_retained_tokens`, the most tokens whose activations it retains at once (a virtual stage counts as its share of
    the stage's layers). `lower_bound` int64 [num_ranks]: no order of the same chunks under the same memory is faster; 0
    where none was looked for. `slots` int64 [num_actions]: that of each action on its stage (see `slots`); None
    where ranks meet in none.
    """

    actions: Actions
    ends: Int64Array
    stage_end: Int64Array
    peak_retained_tokens: Int64Array
    lower_bound: Int64Array
    slots: Int64Array | None


def schedule_ranks(
    chunks: Chunks,
    times: ChunkTimes,
    pp: int,
    schedule: str,
    memory_tokens: int | None,
    rank_label: Callable[[int], str],
    dp: int = 1,
    is_cancelled: Callable[[], bool] = lambda: False,
    slot_ops: Int8Array | None = None,
    actions: Actions | None = None,
) -> Scheduled:
    """Schedule the chunks of many ranks, each for itself; those that share chunks meet (see `simulate`).

    Args:
        schedule: one of `layers.FAMILIES`.
        memory_tokens: what a stage may retain; "search", "auto" and "zero-bubble" make use of it, others are refused
            where they do not fit.
        rank_label: the name of a rank, for errors.
        dp: ranks of a step: they may share chunks, and errors report their memory together.
        is_cancelled: called before each step, or rank, that is searched.
        slot_ops: the slots that ops need, see `slot_ops_of`; None: no slots. They change the ends of actions, not
            their order.
        actions: an existing order, which is only timed.

    Raises:
        CancelledError: `is_cancelled()` was true while there was still something to search.
        UsageError: a rank cannot be scheduled within `memory_tokens`.
    """
    lower_bound, slots = np.zeros(chunks.rank_chunks.size - 1, np.int64), None
    if memory_tokens is not None:
        _refuse_too_little(chunks, memory_tokens, rank_label, dp)
    if actions is None and schedule in TEMPLATES:
        actions = follow_template(chunks, times, pp, TEMPLATES[schedule])
    elif actions is None:
        found = []
        width = dp if schedule in _SPLITS_BACKWARD else 1  # ranks that are looked at together
        own = _unique_group_ids(chunks, dp) if schedule in _SPLITS_BACKWARD else chunks
        for first in range(0, lower_bound.size, width):
            if is_cancelled():
                raise CancelledError
            some = chunks_of_ranks(own, first, first + width), times_of_ranks(own, times, first, first + width)
            actions, lower_bound[first] = _search(schedule, *some, pp, memory_tokens)
            found.append(actions)
        actions = join_actions(found)
    placement = family_of(schedule).placement._replace(virtual_stages=times.durations.shape[1] // pp)
    if slot_ops is not None:
        ends, slots = assign_slots(chunks, actions, times, slot_ops_of("weights"), dp, pp, placement)
        if (slot_ops < 0).any():
            ends = ends_in_slots(chunks, actions, times, slot_ops, slots, dp, pp, placement)
    else:
        ends = simulate(chunks, actions, times, pp, placement, dp)
    retained = -(-peak_retained(chunks, actions) // placement.virtual_stages)
    if memory_tokens is not None:
        _refuse_too_large(retained, pp, schedule, memory_tokens, rank_label)
    assert (ends >= 0).all(), "a schedule in which stages deadlock"
    return Scheduled(actions, ends, ends[actions.stages[1:] - 1], retained, lower_bound, slots)


def _unique_group_ids(chunks: Chunks, dp: int) -> Chunks:
    """Renumber groups so that no two ranks of a step have the same group id."""
    rank = np.repeat(np.arange(chunks.rank_chunks.size - 1, dtype=np.int32) % dp, np.diff(chunks.rank_chunks))
    return chunks._replace(group_id=np.where(chunks.group_id < 0, -1, chunks.group_id * dp + rank).astype(np.int32))


def _search(
    schedule: str, chunks: Chunks, times: ChunkTimes, pp: int, memory_tokens: int | None
) -> tuple[Actions, int]:
    """The best schedule found for a rank, or for the ranks of a step, and a lower bound on its time (0: unknown).

    What takes long to compile is imported where it is used.
    """
    if schedule in _SPLITS_BACKWARD:
        return _cached_auto_step(chunks, times, pp, memory_tokens, _SPLITS_BACKWARD[schedule]), 0
    if schedule == "search":
        from chunkplan.schedule.search import search

        found = search(chunks, times, pp, memory_tokens)
        return found.actions, found.lower_bound
    from chunkplan.schedule.zero_bubble_v import zero_bubble_v

    actions = empty_actions(chunks.keeps_activations, pp, 2 * pp, True)
    zero_bubble_v(chunks, times, pp, actions)
    return actions, 0


def _cached_auto_step(step: Chunks, times: ChunkTimes, pp: int, memory_tokens: int | None, splits: bool) -> Actions:
    """`auto_step` with a cache: for different K, as `tune` tries them, most steps are the same."""
    from chunkplan.schedule.auto import BASELINE_MEMORY, auto_step

    memory = BASELINE_MEMORY if memory_tokens is None else memory_tokens
    if step.num_tokens.size * pp > _CACHE_STEP_SIZE * (step.rank_chunks.size - 1):
        return auto_step(step, times, pp, memory, splits)
    key = blake2b(repr((pp, memory, splits, step.num_tokens.size)).encode(), digest_size=16)
    for values in (*(getattr(step, name) for name in _CACHE_COLUMNS), *times):
        key.update(values)
    actions = _cache.get(key.digest())
    if actions is None:
        if len(_cache) >= _CACHE_STEPS:
            _cache.clear()
        _cache[key.digest()] = actions = auto_step(step, times, pp, memory, splits)
    return actions


def _refuse_too_little(chunks: Chunks, memory_tokens: int, rank_label: Callable[[int], str], dp: int) -> None:
    """Refuse memory that no order of a rank's chunks fits, naming the rank of the first such step that needs most."""
    num_ranks = chunks.rank_chunks.size - 1
    least = np.array([least_memory(chunks_of_rank(chunks, rank)) for rank in range(num_ranks)])
    over = np.flatnonzero(least > memory_tokens)
    if over.size:
        first = int(over[0]) // dp * dp
        rank = first + int(np.argmax(least[first : first + dp]))
        who = "all ranks of the step" if dp > 1 else "this rank"
        raise UsageError(
            f"a stage has to hold activations of {least[rank]:,} tokens at once, max-activation-tokens allows "
            f"{memory_tokens:,}",
            where=rank_label(rank),
            hint=f"--max-activation-tokens {least[rank]} is the least for {who}, no rank takes more than K times "
            "ChunkSize; a smaller --k or --chunk-size holds less",
        )


def _refuse_too_large(
    retained: Int64Array, pp: int, schedule: str, memory_tokens: int, rank_label: Callable[[int], str]
) -> None:
    over = np.flatnonzero(retained > memory_tokens)
    if over.size:
        # Memory that no order fits was refused before, so that one of them does.
        other = "use schedule auto, which fits" if schedule in ("1f1b", "interleaved", "zero-bubble-v") else ""
        other += " (without --virtual-stages)" if schedule == "interleaved" else ""
        raise UsageError(
            f"{schedule} holds activations of {retained[over[0]]:,} tokens on stage {over[0] % pp}, "
            f"max-activation-tokens allows {memory_tokens:,}",
            where=rank_label(int(over[0]) // pp),
            hint=f"{other}; or a smaller --k or --chunk-size holds less".removeprefix("; or "),
        )
