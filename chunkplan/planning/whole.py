"""Assigns whole sequences to a given number of micro-batches on every rank, none of more than a cap of tokens.

For trainers that give every rank as many micro-batches. Sequences go to the rank with the least work so far that has
room, as in `balance/assign.py`, and are exchanged between the heaviest rank and lighter ones; where that finds no room,
all of them are packed first, and then whole micro-batches are assigned.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.balance.assign import best_exchange, exchange, least_gain
from chunkplan.compiled import compiled
from chunkplan.errors import DataError
from chunkplan.packing import pack_lengths
from chunkplan.packing.heuristics import best_fit, martello_toth
from chunkplan.planning.ranks import RankAssignment
from chunkplan.planning.rounds import even_rounds

#: More work than any step has: as part of every sequence's work it lets ranks exchange one for one only.
_ONE_FOR_ONE = 1 << 60

#: Exchanges may gain so much less than between ranks whose chunks are packed later: a few more are made.
_FINER = 16

#: Work that is wanted of each round, in parts of a rank's share; each is tried, 0 is as much of each.
_SHARES = (0.0, 0.9, 0.95, 1.0, 1.02, 1.05, 1.1, 1.2, 1.3)


def assign_whole(
    step_starts: Int64Array,
    tokens: Int64Array,
    work: Int64Array,
    dp: int,
    cap: int,
    micro_batches: int | str,
    *,
    equal_sequences: bool = False,
    stages: int = 1,
    first_step: int = 0,
) -> RankAssignment:
    """Assign the sequences of some steps, those of each step descending by `work`, int64 [n], of `tokens` int64 [n].

    Every rank has `micro_batches`, or in each step as few as possible ("fewest"), of one sequence at least and `cap`
    tokens at most; with `equal_sequences` also as many sequences as every other rank.

    Raises:
        DataError: there is no such assignment, and why; or none was found.
    """
    rank_of, bin_of = np.empty(tokens.size, np.int64), np.empty(tokens.size, np.int64)  # [n] both
    counts = np.empty((step_starts.size - 1, 1), np.int64)  # [num_steps, 1]
    for step, (start, stop) in enumerate(pairwise(step_starts.tolist())):
        own = tokens[start:stop], work[start:stop]
        where = f"step {first_step + step}"
        _check_counts(own[0], dp, cap, equal_sequences, where)
        fewest, most = -(-fewest_micro_batches(own[0], cap) // dp), (stop - start) // dp
        choices = range(fewest, most + 1) if micro_batches == "fewest" else (int(micro_batches),)
        if not choices or choices[0] < fewest or choices[-1] > most:
            may_do = "none may do" if fewest > most else f"{fewest} to {most} on each rank may do"
            raise DataError(
                f"{own[0].size} sequences of {own[0].sum():,} tokens do not go into {dp} x {micro_batches} "
                f"micro-batches: {may_do}, each of one sequence at least and {cap:,} tokens at most",
                where=where,
                hint="change the number of micro-batches, the cap, or the sequences a step; `build --last-batch drop` "
                "leaves out a last step of fewer",
            )
        for count in choices:
            found = assign_step(*own, dp, cap, count, equal_sequences=equal_sequences, stages=stages)
            if found is not None:
                rank_of[start:stop], bin_of[start:stop] = found
                counts[step] = count
                break
        else:
            raise DataError(
                f"found no way to put its {own[0].size} sequences of {own[0].sum():,} tokens into {dp} x {choices[-1]} "
                f"micro-batches of at most {cap:,} tokens, though no bound rules it out",
                where=where,
                hint="use a larger cap" + ", or one micro-batch more" * (choices[-1] < most),
            )
    on_ranks = np.repeat(counts, dp, axis=1)
    return RankAssignment(rank_of, bin_of, np.zeros_like(on_ranks), on_ranks, on_ranks.copy(), counts[:, 0] * dp)


def fewest_micro_batches(tokens: Int64Array, cap: int) -> int:
    """No fewer micro-batches, on all ranks together, hold sequences of `tokens` [n], each at most `cap`."""
    return max(int(martello_toth(np.sort(tokens), cap)), 1)


def assign_step(
    tokens: Int64Array,
    work: Int64Array,
    dp: int,
    cap: int,
    count: int,
    *,
    equal_sequences: bool = False,
    stages: int = 1,
) -> tuple[Int64Array, Int64Array] | None:
    """The rank and the micro-batch of each sequence, int64 [n] both; None where no room was found.

    The sequences descend by `work`; there are `dp * count` of them at least, and a multiple of `dp` if each rank has
    as many. `stages`: of the pipeline of a rank.
    """
    # A rank gets less beside a sequence that outlasts an even micro-batch and so keeps all further stages waiting.
    seen = work.copy()
    seen[:dp] += (stages - 1) * np.maximum(work[:dp] - max(work.sum() // (dp * count), work[dp - 1]), 0)
    rank_of = _ranks(tokens, seen, dp, cap, count, tokens.size // dp if equal_sequences else 0)
    if rank_of[0] >= 0:
        return rank_of, _micro_batches(tokens, work, rank_of, dp, cap, count, stages)
    return None if equal_sequences else _assign_packed(tokens, work, dp, cap, count)


def _check_counts(tokens: Int64Array, dp: int, cap: int, equal_sequences: bool, where: str) -> None:
    """Raises DataError where there is no assignment, whatever the number of micro-batches."""
    if tokens.max() > cap:
        raise DataError(
            f"a sequence has {tokens.max():,} tokens, above the cap of {cap:,}, and sequences stay whole",
            where=where,
            hint=f"use a cap of {tokens.max()} or more, or let sequences be split",
        )
    if tokens.size < dp or (equal_sequences and tokens.size % dp):
        wanted, ranks = f"{dp} or more", f"{tokens.size} or fewer"
        if equal_sequences:
            wanted, ranks = f"a multiple of {dp}", str(max(each for each in range(1, dp) if tokens.size % each == 0))
        raise DataError(
            f"{tokens.size} sequences cannot give each of {dp} ranks {'as many' if equal_sequences else 'one'}",
            where=where,
            hint=f"give a step {wanted} sequences, or use dp {ranks}; `build --last-batch drop` leaves out a last step "
            "of fewer",
        )


@compiled
def _ranks(tokens: Int64Array, work: Int64Array, dp: int, cap: int, count: int, per_rank: int) -> Int64Array:
    """The rank of each sequence, int64 [n], all -1 where no room was found; `per_rank`: sequences of each, 0: any."""
    rank_of = np.full(tokens.size, -1, np.int64)
    rooms = np.full((dp, count), cap, np.int64)
    loads, sizes = np.zeros(dp, np.int64), np.zeros(dp, np.int64)
    lacking = dp * count  # sequences without which a micro-batch would be empty
    for sequence in range(tokens.size):
        chosen = place = -1
        for rank in range(dp):
            is_full = sizes[rank] == per_rank if per_rank > 0 else False
            is_spare = sizes[rank] >= count and tokens.size - sequence <= lacking
            if is_full or is_spare or (chosen >= 0 and loads[rank] >= loads[chosen]):
                continue
            best = -1
            for index in range(count):
                room = rooms[rank, index]
                if room >= tokens[sequence] and (best < 0 or room < rooms[rank, best]):
                    best = index
            if best >= 0:
                chosen, place = rank, best
        if chosen < 0:
            return np.full(tokens.size, -1, np.int64)
        rank_of[sequence] = chosen
        rooms[chosen, place] -= tokens[sequence]
        loads[chosen] += work[sequence]
        lacking -= 1 if sizes[chosen] < count else 0
        sizes[chosen] += 1
    _even_out(tokens, work, rank_of, loads, sizes, cap, count, per_rank)
    return rank_of


@compiled
def _even_out(
    tokens: Int64Array,
    work: Int64Array,
    rank_of: Int64Array,
    loads: Int64Array,
    sizes: Int64Array,
    cap: int,
    count: int,
    per_rank: int,
) -> None:
    """Exchange sequences between the heaviest rank and lighter ones while both still have room; changes `rank_of`."""
    least = max(least_gain(loads) // _FINER, 1)
    mean = loads.sum() // loads.size
    searching = True
    while searching:
        searching = False
        heaviest = int(loads.argmax())
        if loads[heaviest] - mean <= least:
            return
        compared = work + (_ONE_FOR_ONE if per_rank > 0 or sizes[heaviest] <= count else 0)
        for taker in np.argsort(loads, kind="mergesort"):
            gap = loads[heaviest] - loads[taker]
            if gap <= least:
                break
            given, taken = best_exchange(compared, rank_of, heaviest, taker, gap, least)
            if given < 0:
                continue
            exchange(rank_of, given, taken, heaviest, taker)
            if _has_room(tokens, rank_of, heaviest, cap, count) and _has_room(tokens, rank_of, taker, cap, count):
                moved = work[given] - (work[taken] if taken >= 0 else 0)
                loads[heaviest] -= moved
                loads[taker] += moved
                sizes[heaviest] -= 0 if taken >= 0 else 1
                sizes[taker] += 0 if taken >= 0 else 1
                searching = True
                break
            exchange(rank_of, given, taken, taker, heaviest)


@compiled
def _has_room(tokens: Int64Array, rank_of: Int64Array, rank: int, cap: int, count: int) -> bool:
    """True if best-fit decreasing puts the sequences of a rank into `count` micro-batches."""
    _, num_bins = best_fit(tokens[rank_of == rank], cap, np.empty(0, np.int64), np.empty(0, np.bool_), 0)
    return num_bins <= count


@compiled
def _micro_batches(
    tokens: Int64Array, work: Int64Array, rank_of: Int64Array, dp: int, cap: int, count: int, stages: int
) -> Int64Array:
    """The micro-batch of each sequence on its rank, int64 [n], the heaviest first.

    Those that ranks do at a time are alike, which counts where they wait for each other after each. Several shapes are
    tried. The best is done first, waiting after each round and at the end taken together: a pipeline takes the sum of
    its micro-batches, and the heaviest once more for each further stage.
    """
    bin_of, best = np.empty(tokens.size, np.int64), np.int64(-1)
    first = work[: dp * count : dp]  # [count]
    for share in _SHARES:
        bins, longest, slowest = np.empty(tokens.size, np.int64), np.zeros(count, np.int64), np.int64(0)
        wanted = np.maximum(first, even_rounds(int(share * work.sum()) // dp, first, count)) * (share > 0)
        for rank in range(dp):
            own = np.flatnonzero(rank_of == rank)
            found, sums = _fill(tokens[own], work[own], cap, wanted)
            order = np.argsort(-sums, kind="mergesort")
            bins[own] = np.argsort(order)[found]
            longest = np.maximum(longest, sums[order])
            slowest = max(slowest, sums.sum() + (stages - 1) * sums.max())
        value = longest.sum() + (stages - 1) * longest[0] + slowest
        if best < 0 or value < best:
            bin_of, best = bins, value
    return bin_of


@compiled
def _fill(tokens: Int64Array, work: Int64Array, cap: int, wanted: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The micro-batch of each sequence of a rank [n], which descend by work, and the work of each [count].

    Each goes where most is missing of what is `wanted` [count] and there is room; if there is none, all are packed.
    """
    count = wanted.size
    bins, sizes = np.empty(tokens.size, np.int64), np.zeros(count, np.int64)
    rooms, sums = np.full(count, cap, np.int64), np.zeros(count, np.int64)
    for index in range(tokens.size):
        must_open = tokens.size - index <= (sizes == 0).sum()
        chosen = -1
        for each in range(count):
            if rooms[each] < tokens[index] or (must_open and sizes[each] > 0):
                continue
            if chosen < 0 or wanted[each] - sums[each] > wanted[chosen] - sums[chosen]:
                chosen = each
        bins[index] = chosen
        if chosen < 0:
            break
        rooms[chosen] -= tokens[index]
        sums[chosen] += work[index]
        sizes[chosen] += 1
    if (bins < 0).any():
        bins, num_bins = best_fit(tokens, cap, np.empty(0, np.int64), np.empty(0, np.bool_), 0)
        _open_bins(bins, num_bins, count)
        sums[:] = 0
        for index in range(tokens.size):
            sums[bins[index]] += work[index]
    return bins, sums


@compiled
def _open_bins(bins: Int64Array, num_bins: int, wanted: int) -> None:
    """Open bins until there are `wanted`, each with one item of the bin that has most; changes `bins`, int64 [n]."""
    sizes = np.zeros(wanted, np.int64)
    for each in bins:
        sizes[each] += 1
    for opened in range(num_bins, wanted):
        fullest = sizes.argmax()
        bins[np.flatnonzero(bins == fullest)[0]] = opened
        sizes[fullest] -= 1
        sizes[opened] = 1


def _assign_packed(
    tokens: Int64Array, work: Int64Array, dp: int, cap: int, count: int
) -> tuple[Int64Array, Int64Array] | None:
    """The rank and the micro-batch of each sequence, where all are packed first; None where they are too many."""
    packing = pack_lengths(tokens, cap, certify=False)
    if packing.num_bins > dp * count:
        return None
    bins = packing.bin_of
    _open_bins(bins, packing.num_bins, dp * count)
    sums = np.zeros(dp * count, np.int64)
    np.add.at(sums, bins, work)
    rank_of_bin, place = np.empty_like(sums), np.empty_like(sums)
    lightest = [(0, 0, rank) for rank in range(dp)]
    for each in np.argsort(-sums, kind="stable").tolist():  # to the rank with the least work that lacks some
        load, size, rank = heappop(lightest)
        rank_of_bin[each], place[each] = rank, size
        if size + 1 < count:
            heappush(lightest, (load + int(sums[each]), size + 1, rank))
    return rank_of_bin[bins], place[bins]
