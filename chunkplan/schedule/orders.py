"""Orders of the chunks of ranks, and how many forwards may come before each backward."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.cost.durations import ChunkTimes
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import BACKWARD, unit_end


class Order(NamedTuple):
    """The order in which all stages forward the chunks of a rank, and that in which they backward them: int64 [n].

    Links carry chunks in one order. Those of a group forward in ascending and backward in descending order.
    """

    forwards: Int64Array
    backwards: Int64Array


@compiled
def units_by_work(chunks: Chunks, times: ChunkTimes, direction: int) -> Order:
    """Units (standalone chunks, groups) one by one: as they come (0), or by work, ascending (1) or descending (-1).

    What is shared with other ranks stays first, as it comes. Ranks, whose groups have different numbers, follow one
    another.
    """
    n = chunks.keeps_activations.size
    order = Order(np.empty(n, np.int64), np.empty(n, np.int64))
    heads, keys = np.empty(n, np.int64), np.empty(n, np.int64)
    for rank in range(chunks.rank_chunks.size - 1):
        num_units, start, end = 0, chunks.rank_chunks[rank], chunks.rank_chunks[rank + 1]
        position = start
        while start < end:
            stop = unit_end(chunks.group_id, start)
            key = direction * np.sum(times.durations[BACKWARD, 0, start:stop])
            if chunks.cp_size[start] > 1:
                key = np.int64(np.iinfo(np.int64).min)
            place = num_units
            while place > 0 and keys[place - 1] > key:  # insertion: compiles much faster than a sort
                keys[place], heads[place] = keys[place - 1], heads[place - 1]
                place -= 1
            keys[place], heads[place] = key, start
            num_units += 1
            start = stop
        for start in heads[:num_units]:
            stop = unit_end(chunks.group_id, start)
            for chunk in range(start, stop):
                order.forwards[position + chunk - start] = chunk
                order.backwards[position + stop - 1 - chunk] = chunk
            position += stop - start
    return order


@compiled
def least_forwards(order: Order) -> Int64Array:
    """The fewest forwards before each backward in order, int64 [n]: its own and those of earlier ones."""
    place = np.empty(order.forwards.size, np.int64)  # [n]
    for index in range(place.size):
        place[order.forwards[index]] = index
    least = place[order.backwards] + 1
    for index in range(1, least.size):
        least[index] = max(least[index], least[index - 1])
    return least


@compiled
def most_forwards(chunks: Chunks, order: Order, memory: int) -> Int64Array:
    """The most forwards before each backward in order, int64 [n], with which no backward ever lacks memory.

    Below `least_forwards` where this order of chunks does not fit `memory` tokens, however it is scheduled. Weight
    halves are taken as done: they wait for nothing, so they can always make their room.
    """
    kept = (chunks.keeps_activations * chunks.num_tokens).astype(np.int64)
    return _most_within(order, kept, kept, chunks.num_tokens - kept, memory)


@compiled
def most_forwards_by_kv(order: Order, kv: Int64Array, limit: int) -> Int64Array:
    """The same for a limit on tokens with keys and values; `kv`: see `kv_tokens`."""
    return _most_within(order, kv[0], kv[1], np.zeros(kv.shape[1], np.int64), limit)


@compiled
def _most_within(order: Order, comes: Int64Array, goes: Int64Array, again: Int64Array, limit: int) -> Int64Array:
    """The most forwards before each backward in order, int64 [n], with at most `limit` tokens held.

    What `comes` with the forward of each chunk `goes` with its backward, for which more comes `again`: int64 [n].
    """
    n = order.forwards.size
    held = np.zeros(n + 1, np.int64)  # by the first so many forwards
    for index, chunk in enumerate(order.forwards):
        held[index + 1] = held[index] + comes[chunk]
    most = np.empty(n, np.int64)
    released = np.int64(0)
    for index, chunk in enumerate(order.backwards):
        most[index] = np.searchsorted(held, limit + released - again[chunk], side="right") - 1
        released += goes[chunk]
    for index in range(n - 2, -1, -1):
        most[index] = min(most[index], most[index + 1])
    return most


@compiled
def limit_forwards(least: Int64Array, most: Int64Array, ahead: int) -> Int64Array:
    """The most forwards before each backward in order, int64 [n], `ahead` of what the backwards need by themselves."""
    limit: Int64Array = np.minimum(np.maximum(np.arange(least.size) + 1, least) + ahead, most)
    return limit
