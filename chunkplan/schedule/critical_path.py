"""The critical path of a schedule: the actions, one after the other, that make it take as long as it does."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int8Array, Int64Array
from chunkplan.cost.durations import ChunkTimes
from chunkplan.layers import STRAIGHT, StagePlacement, links_before
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD_KV,
    Actions,
    model_stages_of,
)


def start_times(
    chunks: Chunks, actions: Actions, times: ChunkTimes, ends: Int64Array, pp: int, placement: StagePlacement = STRAIGHT
) -> Int64Array:
    """When each action of all stages of some ranks starts, int64 [num_actions]; `ends` is when it ends.

    `placement`: where model stages lie.
    """
    row = np.repeat(np.arange(actions.stages.size - 1), np.diff(actions.stages))
    model_stage = model_stages_of(actions, pp, placement)
    chunk = chunks.rank_chunks[row // pp] + actions.chunk_ids
    starts: Int64Array = ends - times.durations[actions.ops, model_stage, chunk]
    return starts


def arrival_times(
    chunks: Chunks, actions: Actions, times: ChunkTimes, ends: Int64Array, pp: int, placement: StagePlacement = STRAIGHT
) -> tuple[Int64Array, Int64Array]:
    """When each action is there, int64 [num_actions]: its stage is free and what it waits for has arrived.

    It starts then, or later where it waits for other ranks. Returns with it the place of the action that came just
    then, int64 [num_actions], -1 where there is none: of its stage, where both came at once.
    """
    num_model_stages = times.durations.shape[1]
    row = np.repeat(np.arange(actions.stages.size - 1), np.diff(actions.stages))
    model_stage = model_stages_of(actions, pp, placement)
    chunk = chunks.rank_chunks[row // pp] + actions.chunk_ids
    is_forward = actions.ops <= FORWARD_KV
    is_backward = (actions.ops == BACKWARD) | (actions.ops == BACKWARD_INPUT)
    # [way, model stage, n], with an empty model stage before the first and after the last
    sender = np.full((2, num_model_stages + 2, times.link.size), -1, np.int64)
    for way, sends in enumerate((is_forward, is_backward)):
        places = np.flatnonzero(sends)
        sender[way, model_stage[places] + 1, chunk[places]] = places
    sent_by = np.where(is_forward, sender[0, model_stage, chunk], sender[1, model_stage + 2, chunk])
    sent_by[~is_forward & ~is_backward] = -1
    link = times.link[chunk] * links_before(np.where(is_forward, model_stage, model_stage + 1), pp, placement)
    sent = np.where(sent_by < 0, 0, ends[sent_by] + link)

    before = np.arange(ends.size) - 1
    before[actions.stages[:-1]] = -1
    free = np.where(before < 0, 0, ends[before])
    return np.maximum(free, sent), np.where(free >= sent, before, sent_by)


def critical_path(
    chunks: Chunks,
    actions: Actions,
    times: ChunkTimes,
    ends: Int64Array,
    pp: int,
    last: int,
    placement: StagePlacement = STRAIGHT,
    meeting: Int8Array | None = None,
) -> list[int]:
    """The places in `actions` of those on the critical path to the one at `last`, in order of time.

    Every action starts when its stage is free and what it waits for has arrived, so one of the two ends, or is sent,
    just in time. Walks back over these from `last` to an action that starts at 0; where both are just in time, it stays
    on the stage. What ranks do with a chunk that they share starts when the last of them is there: the walk goes on
    with what this one did before, on its own stages. Of what they do with it at the same time, that of the rank of
    `last` is on the path, so that the path is on other ranks only where these alone are waited for. Of what ranks do in
    a slot, it goes on with the longest, and from there with whatever that slot has waited for. What lies between two
    actions of the path is the way over a link, so their times and those of the links add up to the end of `last`.

    Args:
        chunks, actions, times: of one rank, or of all ranks of a step, which follow one another.
        ends: int64 [num_actions], see `simulate`.
        pp: stages of a rank.
        placement: where model stages lie.
        meeting: which ops ranks meet for in slots, see `meeting_of`; None: for none.
    """
    starts = start_times(chunks, actions, times, ends, pp, placement)
    arrivals, came_from = arrival_times(chunks, actions, times, ends, pp, placement)
    row = np.repeat(np.arange(actions.stages.size - 1), np.diff(actions.stages))
    slots = np.full(ends.size, -1, np.int64)
    if meeting is not None:
        met = meeting[actions.ops].astype(np.int64)
        slots = np.where(met < 0, -1, met * times.durations.shape[1] + actions.virtual_stages)
    stand_in = _done_together(chunks, actions, starts, ends, row, pp, int(row[last]) // pp)
    action, path = last, list[int]()
    together = np.empty(0, np.int64)
    while True:
        on_stage = row % pp == row[action] % pp
        if slots[action] >= 0:  # those in a slot end together: the longest
            together = np.flatnonzero(on_stage & (ends == ends[action]) & (slots == slots[action]))
            action = int(together[np.argmin(starts[together])])
        action = int(stand_in[action])
        path.append(action)
        start = starts[action]
        if start <= 0:
            return path[::-1]
        if arrivals[action] == start:
            before = int(came_from[action])
        elif meeting is not None and (over := np.flatnonzero(on_stage & (ends == start))).size:
            before = int(over[0])  # the slot before it, or what somebody else has done before theirs
        elif slots[action] >= 0:
            before = int(came_from[together[np.argmax(arrivals[together])]])
        else:
            before = int(came_from[_last_to_come(chunks, actions, arrivals, row, pp, action)])
        assert before >= 0 and starts[before] <= start, "an action that starts later than it has to"
        action = before


def _done_together(
    chunks: Chunks, actions: Actions, starts: Int64Array, ends: Int64Array, row: Int64Array, pp: int, rank: int
) -> Int64Array:
    """The place of what `rank` does at the same time with the same shared chunk; of other actions their own place.

    int64 [num_actions]; `row`: the stage of each action, of all ranks. A shared chunk has one number on all ranks.
    """
    chunk = chunks.rank_chunks[row // pp] + actions.chunk_ids
    first = chunks.cp_first_rank[chunk]
    is_met = (chunks.cp_size[chunk] > 1) & (first <= rank) & (rank < first + chunks.cp_size[chunk])
    is_met &= actions.ops != BACKWARD_WEIGHT  # each rank by itself
    own = np.flatnonzero(is_met & (row // pp == rank))
    what = (actions.ops, row % pp, actions.virtual_stages, actions.chunk_ids)
    place_of = np.full([int(column.max()) + 1 for column in what], -1, np.int64)
    place_of[tuple(column[own] for column in what)] = own
    met = np.where(is_met, place_of[what], -1)
    is_same = (met >= 0) & (starts[met] == starts) & (ends[met] == ends)
    places: Int64Array = np.where(is_same, met, np.arange(ends.size))
    return places


def _last_to_come(chunks: Chunks, actions: Actions, arrivals: Int64Array, row: Int64Array, pp: int, action: int) -> int:
    """The place of what another rank does with the same shared chunk as `action`: of those that are there last."""
    chunk = chunks.rank_chunks[row[action] // pp] + actions.chunk_ids[action]
    first = int(chunks.cp_first_rank[chunk])
    start, stop = (int(actions.stages[rank * pp]) for rank in (first, first + int(chunks.cp_size[chunk])))
    is_same = (row[start:stop] % pp == row[action] % pp) & (actions.ops[start:stop] == actions.ops[action])
    for values in (actions.chunk_ids, actions.virtual_stages):
        is_same &= values[start:stop] == values[action]
    places = start + np.flatnonzero(is_same)
    return int(places[np.argmax(arrivals[places])])
