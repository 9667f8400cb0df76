"""How long it takes from a job to the end of all, whatever stages do: what makes one job more urgent than another."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.cost.durations import ChunkTimes
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import RECOMPUTE
from chunkplan.schedule.bounds import Jobs
from chunkplan.schedule.orders import Order


@compiled
def write_tails(
    chunks: Chunks, times: ChunkTimes, jobs: Jobs, order: Order, rank: int, forwards: Int64Array, tails: Int64Array
) -> int:
    """Write the tail of every job of a rank into `tails` int64 [pp, 2 n], and return the longest one.

    A tail is the longest path from the start of a job to the end of all: over links, from the last stage's forward of a
    chunk to its backward, along both orders, and from a backward to the first forward that has to wait for it.
    No schedule with these orders and limits is done before the longest tail is.

    `jobs`, `order` (the chunks of one rank after another) and `forwards` int64 [pp, n], the most forwards of the rank
    before each of its backwards in order, no fewer than `least_forwards`, are those of all ranks of `chunks`.
    """
    n, pp = order.forwards.size, forwards.shape[0]
    base, end = chunks.rank_chunks[rank], chunks.rank_chunks[rank + 1]
    backward_place = np.empty(n, np.int64)
    backward_place[order.backwards[base:end]] = np.arange(base, end)
    # The places in both orders that are next, from the last one down.
    forward, backward = np.full(pp, end - 1), np.full(pp, end - 1)
    longest, moving = np.int64(0), True
    while moving:
        moving = False
        for stage in range(pp):
            while backward[stage] >= base:
                place = backward[stage]
                chunk, limit = order.backwards[place], base + forwards[stage, place]
                is_limit = place + 1 < end and limit < end
                if (stage > 0 and backward[stage - 1] >= place) or (is_limit and forward[stage] >= limit):
                    break
                tail = np.int64(0)
                if stage > 0:
                    tail = _from_arrival(chunks, times, tails, stage - 1, chunk) + times.link[chunk]
                if place + 1 < end:
                    tail = max(tail, tails[stage, n + order.backwards[place + 1]])
                if is_limit:
                    tail = max(tail, tails[stage, order.forwards[limit]])
                tails[stage, n + chunk] = tail + jobs.work[stage, n + chunk]
                longest = max(longest, tails[stage, n + chunk])
                backward[stage] -= 1
                moving = True
        for stage in range(pp - 1, -1, -1):
            while forward[stage] >= base:
                place = forward[stage]
                chunk = order.forwards[place]
                if stage + 1 < pp:
                    if forward[stage + 1] >= place:
                        break
                    tail = tails[stage + 1, chunk] + times.link[chunk]
                else:
                    if backward[stage] >= backward_place[chunk]:
                        break
                    tail = tails[stage, n + chunk]
                if place + 1 < end:
                    tail = max(tail, tails[stage, order.forwards[place + 1]])
                tails[stage, chunk] = tail + jobs.work[stage, chunk]
                longest = max(longest, tails[stage, chunk])
                forward[stage] -= 1
                moving = True
    return int(longest)


@compiled
def _from_arrival(chunks: Chunks, times: ChunkTimes, tails: Int64Array, stage: int, chunk: int) -> int:
    """The time from the arrival of a chunk's gradient at `stage`, which has recomputed it by then, to the end."""
    tail = tails[stage, chunks.keeps_activations.size + chunk]
    return int(tail if chunks.keeps_activations[chunk] else tail - times.durations[RECOMPUTE, stage, chunk])
