"""Heuristics over the histogram of lengths: best-fit decreasing, and minimum bin slack.

In best-fit decreasing items are placed longest first, each into the bin it leaves least room in (Johnson 1973). Bins
with equal room behave alike, so that runs of bins are filled at once, with as many items of the length at hand as fit.
Lengths descend, so a bin with too little room for one length, once it has enough for a later one, has less than all
that had enough before: bins that fit are a stack, those that do not yet fit a heap. The work depends on the number of
distinct lengths, and on items only where their bins are written down; the capacity does not matter.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array
from chunkplan.compiled import compiled, copy_to
from chunkplan.packing.histogram import starts

# Lower bounds on the number of bins from counting alone: no packing needs fewer.


@compiled
def martello_toth(ascending: Int64Array, capacity: int) -> int:
    """L2 of items sorted `ascending` [n]; see `martello_toth_counted`."""
    return martello_toth_counted(ascending, np.ones_like(ascending), capacity)


@compiled
def martello_toth_counted(distinct: Int64Array, counts: Int64Array, capacity: int) -> int:
    """L2 of Martello and Toth ("Lower bounds and reduction procedures for the bin packing problem", 1990).

    There are counts[i] items of length distinct[i], ascending. For a threshold t <= capacity / 2: items over
    capacity - t share a bin with nothing counted here, items over capacity / 2 share with no other such item, and what
    items of [t, capacity / 2] do not find room for beside the latter needs bins of its own. t = 0 gives L1 at least.
    Both ends of the window move one way as t grows, so one pass over the lengths does.
    """
    half = np.searchsorted(distinct, capacity // 2, side="right")  # distinct[half:] are over capacity / 2
    num_large, room, small = 0, 0, 0
    for index in range(half, distinct.size):
        num_large += counts[index]
        room += counts[index] * (capacity - distinct[index])
    for index in range(half):
        small += counts[index] * distinct[index]
    best = num_large + max(0, -((room - small) // capacity))
    alone = distinct.size  # distinct[alone:] are over capacity - t
    for first in range(half):
        while alone > half and distinct[alone - 1] > capacity - distinct[first]:
            alone -= 1
            room -= counts[alone] * (capacity - distinct[alone])
        best = max(best, num_large + max(0, -((room - small) // capacity)))
        small -= counts[first] * distinct[first]
    return best


# Best fit of items into bins of which some are partly filled already: the packing of one rank in one step.


@compiled
def best_fit(
    items: Int64Array, capacity: int, rooms: Int64Array, second_choice: BoolArray, largest_second: int
) -> tuple[Int64Array, int]:
    """Put each item, in the order given, into the bin it leaves least room in: (bin of each item, number of bins).

    Bins 0..len(rooms)-1 are there already, with `rooms` left; further ones have `capacity`. A bin of `second_choice` is
    taken where an item of at most `largest_second` would otherwise need a new bin. With items in descending order this
    is best-fit decreasing (Johnson 1973).
    """
    bin_of = np.empty(items.size, np.int64)  # [n]
    num_bins = rooms.size
    # Open bins by room, ascending: a bin moves towards the front as it fills.
    room = np.empty(rooms.size + items.size, np.int64)  # [num_rooms + n], the most bins there can be
    owner = np.empty(rooms.size + items.size, np.int64)  # the bin of each
    num_open = 0
    for index in np.argsort(rooms, kind="mergesort"):
        if rooms[index] > 0 and not second_choice[index]:
            room[num_open], owner[num_open] = rooms[index], index
            num_open += 1
    left = rooms.copy()
    for item in range(items.size):
        size = items[item]
        place = np.searchsorted(room[:num_open], size - 1, side="right")  # the first with room enough
        if place == num_open:
            fallback = -1
            for index in range(rooms.size if size <= largest_second else 0):
                if second_choice[index] and left[index] >= size and (fallback < 0 or left[index] < left[fallback]):
                    fallback = index
            if fallback >= 0:
                left[fallback] -= size
                bin_of[item] = fallback
                continue
            room[place], owner[place] = capacity, num_bins
            num_bins += 1
            num_open += 1
        target, rest = owner[place], room[place] - size
        bin_of[item] = target
        while place > 0 and room[place - 1] > rest:
            room[place], owner[place] = room[place - 1], owner[place - 1]
            place -= 1
        room[place], owner[place] = rest, target
    return bin_of, num_bins


@compiled
def best_fit_decreasing_counted(
    distinct: Int64Array, counts: Int64Array, capacity: int, sorted_bins: Int64Array
) -> int:
    """Pack counts[i] items of length distinct[i], ascending; returns the number of bins.

    Writes the bin of each item, in ascending order of length, to `sorted_bins` int64 [n].
    """
    # Runs of bins: (room, first bin, number). At the bottom lie the bins not yet opened, more than are needed.
    fitting = [(capacity, 0, sorted_bins.size + 1)]
    waiting = [(0, 0, 0)]  # a heap, by -room; this one never fits
    stop = sorted_bins.size
    for index in range(distinct.size - 1, -1, -1):
        length, left = distinct[index], counts[index]
        while -waiting[0][0] >= length:
            negative_room, start, num_bins = heappop(waiting)
            fitting.append((-negative_room, start, num_bins))
        while left > 0:
            room, start, num_bins = fitting.pop()
            each = room // length
            full = min(num_bins, left // each)
            for target in range(start, start + full):
                sorted_bins[stop - each : stop] = target
                stop -= each
            left -= full * each
            if full > 0 and room - each * length >= distinct[0]:
                heappush(waiting, (each * length - room, start, full))
            if full < num_bins:  # the items do not fill another one
                started = 1 if left > 0 else 0
                fitting.append((room, start + full + started, num_bins - full - started))
                if left > 0:
                    sorted_bins[stop - left : stop] = start + full
                    stop -= left
                    fitting.append((room - left * length, start + full, 1))
                    left = 0
    _, num_opened, _ = fitting[0]
    return num_opened


# Minimum bin slack over the histogram of lengths.
#
# Bins are filled one after the other, each with the set of remaining items that leaves least room (Gupta and Ho, "A new
# heuristic algorithm for the one-dimensional bin-packing problem", 1999), one of the longest items left among them
# (Fleszar and Hindi, "New heuristics for one-dimensional bin-packing", 2002). The set found for one bin fills as many
# bins as there are items for. The search for a set takes a bounded number of steps; the best one found by then is used.


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
                copy_to(chosen[:depth], path[:depth])
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
        copy_to(chosen[:depth], path[:depth])
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
