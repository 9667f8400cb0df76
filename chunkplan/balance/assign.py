"""Assigns the sequences of a step to ranks by their work, and evens out what two ranks have by exchanging sequences.

Sequences assigned before they are packed balance better than packed chunks do, whose costs are lumps.
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array
from chunkplan.compiled import compiled

#: An exchange has to gain 1/_EXCHANGE_GAIN_PARTS of the mean, so that there are few of them.
_EXCHANGE_GAIN_PARTS = 4096


@compiled
def assign(work: Int64Array, chosen: BoolArray, loads: Int64Array) -> Int64Array:
    """The rank of every sequence that is `chosen` [n], int64 [n], -1 of the others; `work` [n] of the chosen descends.

    Longest processing time first (Graham 1969): each sequence, dearest first, goes to the rank with the least work so
    far, the lowest of several. The heaviest rank gets at most 4/3 of the best possible where none has `loads` [dp], the
    work that it begins with.
    """
    rank_of = np.full(work.size, -1, np.int64)  # [n]
    sums = loads.copy()
    for sequence in range(work.size):
        if chosen[sequence]:
            lightest = sums.argmin()
            rank_of[sequence] = lightest
            sums[lightest] += work[sequence]
    return rank_of


@compiled
def least_gain(loads: Int64Array) -> int:
    """The least reduction of the heavier of two ranks, given the loads of all, that makes an exchange worth it."""
    return max(int(loads.sum()) // loads.size // _EXCHANGE_GAIN_PARTS, 1)


@compiled
def best_exchange(
    work: Int64Array, rank_of: Int64Array, giver: int, taker: int, gap: int, least: int
) -> tuple[int, int]:
    """The exchange that brings two ranks, `gap` > 0 apart, closest together: (given, taken).

    `work` [n] is in descending order. `taken` is -1 where nothing comes back, `given` -1 where no exchange takes at
    least `least` off the heavier of the two.
    """
    half = gap // 2  # moving half the gap closes it
    best = gap - 2 * least + 1  # twice the distance from that
    given = taken = -1
    candidate = -1  # the last sequence of the taker that is dearer than wanted
    following = -1  # the first one that is not
    for offered in range(work.size):
        if rank_of[offered] != giver:
            continue
        wanted = work[offered] - half
        while following < work.size and (following < 0 or rank_of[following] != taker or work[following] > wanted):
            if following >= 0 and rank_of[following] == taker:
                candidate = following
            following += 1
        for returned in (candidate, following, -1):
            if returned == work.size:
                continue
            moved = work[offered] - (work[returned] if returned >= 0 else 0)
            distance = abs(2 * moved - gap)
            if 0 < moved < gap and distance < best:
                best, given, taken = distance, offered, returned
    return given, taken


@compiled
def exchange(rank_of: Int64Array, given: int, taken: int, giver: int, taker: int) -> None:
    """Apply an exchange found by `best_exchange`."""
    rank_of[given] = taker
    if taken >= 0:
        rank_of[taken] = giver


@compiled
def even_out(work: Int64Array, rank_of: Int64Array, loads: Int64Array) -> None:
    """Exchange sequences between the heaviest rank and lighter ones until no exchange helps; changes `rank_of`.

    `work` [n] is in descending order, but for sequences of rank -1, which stay; `loads` [dp] is what ranks have beside.
    """
    loads = loads.copy()
    for sequence in range(work.size):
        if rank_of[sequence] >= 0:
            loads[rank_of[sequence]] += work[sequence]
    mean = loads.sum() // loads.size
    least = least_gain(loads)
    while True:
        heaviest = int(loads.argmax())
        if loads[heaviest] - mean <= least:
            return
        improved = False
        for taker in np.argsort(loads, kind="mergesort"):
            gap = loads[heaviest] - loads[taker]
            if gap <= least:
                break
            given, taken = best_exchange(work, rank_of, heaviest, taker, gap, least)
            if given < 0:
                continue
            moved = work[given] - (work[taken] if taken >= 0 else 0)
            exchange(rank_of, given, taken, heaviest, taker)
            loads[heaviest] -= moved
            loads[taker] += moved
            improved = True
            break
        if not improved:
            return
