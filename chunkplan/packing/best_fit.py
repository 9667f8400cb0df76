"""Best fit of items into bins of which some are partly filled already: the packing of one rank in one step."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array
from chunkplan.compiled import compiled


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
    owner = np.empty(rooms.size + items.size, np.int64)  # [num_rooms + n], the most bins there can be
    num_open = 0
    for index in np.argsort(rooms, kind="mergesort"):
        if rooms[index] > 0 and not second_choice[index]:
            room[num_open], owner[num_open] = rooms[index], index
            num_open += 1
    left = rooms.copy()
    for item in range(items.size):
        size = items[item]
        place = np.searchsorted(room[:num_open], size)
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
