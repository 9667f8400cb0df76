"""Minimum bin slack over the histogram of lengths.

Bins are filled one after the other, each with the set of remaining items that leaves least room (Gupta and Ho, "A new
heuristic algorithm for the one-dimensional bin-packing problem", 1999), one of the longest items left among them
(Fleszar and Hindi, "New heuristics for one-dimensional bin-packing", 2002). The set found for one bin fills as many
bins as there are items for. The search for a set takes a bounded number of steps; the best one found by then is used.
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.packing.histogram import starts

# Items put into a bin or taken back, for one set.
_SEARCH = 2000


@compiled
def minimum_bin_slack_counted(distinct: Int64Array, counts: Int64Array, capacity: int, sorted_bins: Int64Array) -> int:
    """Pack counts[i] items of length distinct[i], ascending; returns the number of bins.

    Writes the bin of each item, in ascending order of length, to `sorted_bins` int64 [n].
    """
    if sorted_bins.size == 0:
        return 0
    left = counts.copy()
    following = starts(counts)
    # link[i + 1] is i + 1 while length i has items left, then leads to one of a shorter length; 0 means none.
    link = np.arange(distinct.size + 1)
    path = np.empty(min(sorted_bins.size, capacity // distinct[0]), np.int64)  # [most items a bin has]
    chosen = np.empty_like(path)
    num_bins = shortest = 0
    while True:
        longest = _longest_left(link, left, distinct.size - 1)
        if longest < 0:
            return num_bins
        while left[shortest] == 0:
            shortest += 1
        num_chosen = _fullest_set(distinct, left, link, longest, distinct[shortest], capacity, path, chosen)
        repeats = sorted_bins.size
        alike = 0
        for place in range(num_chosen):
            alike = alike + 1 if place > 0 and chosen[place] == chosen[place - 1] else 1
            repeats = min(repeats, left[chosen[place]] // alike)
        for index in chosen[:num_chosen]:
            for repeat in range(repeats):
                sorted_bins[following[index] + repeat] = num_bins + repeat
            following[index] += repeats
            left[index] -= repeats
            if left[index] == 0:
                link[index + 1] = index
        num_bins += repeats


@compiled
def _fullest_set(
    distinct: Int64Array,
    left: Int64Array,
    link: Int64Array,
    longest: int,
    shortest_length: int,
    capacity: int,
    path: Int64Array,
    chosen: Int64Array,
) -> int:
    """Choose items for one bin, one of the `longest` among them: writes their lengths' indices, returns their number.

    Sets are tried longest items first. `path` is scratch; `left` is as before afterwards.
    """
    depth, room, least_room, num_chosen = 0, capacity, capacity, 0
    candidate = longest
    for _ in range(_SEARCH):
        if candidate >= 0:
            path[depth] = candidate
            left[candidate] -= 1
            room -= distinct[candidate]
            depth += 1
            limit = min(room, distinct[candidate])
        else:
            if room < least_room:
                least_room, num_chosen = room, depth
                chosen[:depth] = path[:depth]
            if least_room == 0 or depth == 1:
                break
            depth -= 1
            candidate = path[depth]
            left[candidate] += 1
            room += distinct[candidate]
            # A shorter one in its place has to leave room for one more.
            limit = min(room - shortest_length, distinct[candidate] - 1)
        candidate = _longest_left(link, left, np.searchsorted(distinct, limit, side="right") - 1)
    for index in path[:depth]:
        left[index] += 1
    if room < least_room:
        num_chosen = depth
        chosen[:depth] = path[:depth]
    return num_chosen


@compiled
def _longest_left(link: Int64Array, left: Int64Array, index: int) -> int:
    """The longest length from `index` downwards that has items left; -1 if there is none."""
    place = index + 1
    while True:
        while link[place] != place:
            link[place] = link[link[place]]
            place = link[place]
        if place == 0 or left[place - 1] > 0:
            return place - 1
        place -= 1
