"""Assigns whole sequences to groups of ranks, round by round: every rank has something to do in each micro-batch.

For trainers in which the number of ranks that share a micro-batch may change with each (dynamic context parallelism).
A round is one micro-batch on all ranks. These are divided into groups of consecutive ranks, of a power of two that
divides the first one's number, or of all; a group packs its sequences and shares each evenly.

A round lasts as long as its slowest group. So sequences that would outlast a round's share of the work alone get as
many ranks as bring them below it, widest first; the others go where the group is done first, dearest first (malleable
jobs in two phases: Turek, Wolf and Yu, SPAA 1992). Several numbers of rounds and shares are tried.
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled

#: How long a round may be, in parts of what it would be were all ranks busy all of the time; each is tried.
_SHARES = (1.0, 1.01, 1.02, 1.04, 1.06, 1.08, 1.11, 1.15, 1.2, 1.3, 1.45, 1.6, 2.0)

#: Numbers of rounds that are tried, from the fewest whose ranks have room, and how many more until one is found.
_TRIED, _MOST_TRIED = 4, 16

#: A plan is good enough within this part of the work divided by the ranks.
_ENOUGH = 1000


def plan_rounds(
    tokens: Int64Array,
    work: Int64Array,
    ranks: int,
    cap: int,
    *,
    multiple: int = 1,
    least_size: int = 1,
    most_sequences: int | None = None,
) -> list[list[list[int]]] | None:
    """The places of the sequences of each rank in each round, `[rounds][ranks]` lists; None where none were found.

    Args:
        tokens: of each sequence, int64 [n]; a group of s ranks takes at most `s * cap` in a round.
        work: of each sequence alone on a rank, int64 [n]; a group of s ranks is done with it s times as fast.
        ranks: how many there are.
        cap: most tokens of a rank in a round.
        multiple: the number of rounds is a multiple of it.
        least_size: ranks of a group at least, a power of two.
        most_sequences: sequences of a group in a round at most.
    """
    order = np.argsort(-work, kind="stable")
    sizes = np.array([size for size in 2 ** np.arange(ranks.bit_length()) if least_size <= size < ranks] + [ranks])
    fewest = max(-(-int(tokens.sum()) // (ranks * cap)), 1)
    first = -(-fewest // multiple) * multiple
    limit = most_sequences or tokens.size
    found = None
    enough = int(work.sum()) // ranks * (_ENOUGH + 1) // _ENOUGH
    for tried, rounds in enumerate(range(first, first + _MOST_TRIED * multiple, multiple)):
        for share in _SHARES:
            if found is not None and (found[0] <= enough or tried >= _TRIED):
                break
            trial = _try_rounds(tokens[order], work[order], ranks, sizes, cap, rounds, share, limit)
            if trial[0] > 0 and (found is None or trial[0] < found[0]):
                found = trial
    if found is None:
        return None
    _, group_of, rounds_of, first_rank, size = found
    plan: list[list[list[int]]] = [[[] for _ in range(ranks)] for _ in range(int(rounds_of.max()) + 1)]
    for place, group in sorted(zip(order.tolist(), group_of.tolist(), strict=True)):
        for rank in range(first_rank[group], first_rank[group] + size[group]):
            plan[rounds_of[group]][rank].append(place)
    return plan


@compiled
def _try_rounds(
    tokens: Int64Array,
    work: Int64Array,
    ranks: int,
    sizes: Int64Array,
    cap: int,
    rounds: int,
    share: float,
    most_sequences: int,
) -> tuple[int, Int64Array, Int64Array, Int64Array, Int64Array]:
    """Rounds of sequences that descend by work [n]: (time of all, or 0 without room; group of each [n]; of each group
    its round, its first rank and its size [groups])."""
    n = tokens.size
    group_of = np.full(n, -1, np.int64)
    most = ranks * rounds
    rounds_of, first_rank = np.zeros(most, np.int64), np.zeros(most, np.int64)
    size, room = np.zeros(most, np.int64), np.zeros(most, np.int64)
    count, load = np.zeros(most, np.int64), np.zeros(most, np.int64)
    none = 0, group_of, rounds_of, first_rank, size

    wanted = _sizes_wanted(tokens, work, sizes, cap, max(int(share * _share_of_round(work, ranks, rounds)), 1))
    used = np.zeros(rounds, np.int64)
    num_groups = 0
    for index in range(sizes.size - 1, -1, -1):
        for sequence in range(n if index > 0 else 0):
            if wanted[sequence] != index:
                continue
            target = int(used.argmin())
            if used[target] + sizes[index] > ranks:
                return none
            rounds_of[num_groups], first_rank[num_groups], size[num_groups] = target, used[target], sizes[index]
            used[target] += sizes[index]
            group_of[sequence] = num_groups
            num_groups += 1
    for target in range(rounds):
        while used[target] < ranks:
            own = sizes[0] if used[target] + sizes[0] <= ranks else ranks - used[target]
            rounds_of[num_groups], first_rank[num_groups], size[num_groups] = target, used[target], own
            used[target] += own
            num_groups += 1
    room[:num_groups] = size[:num_groups] * cap
    for sequence in range(n):
        group = group_of[sequence]
        if group >= 0:
            room[group] -= tokens[sequence]
            load[group] += work[sequence] // size[group]
            count[group] += 1
    for sequence in range(n):
        if group_of[sequence] >= 0:
            continue
        chosen, soonest = -1, np.int64(0)
        for group in range(num_groups):
            done = load[group] + work[sequence] // size[group]
            if room[group] >= tokens[sequence] and count[group] < most_sequences and (chosen < 0 or done < soonest):
                chosen, soonest = group, done
        if chosen < 0:
            return none
        group_of[sequence] = chosen
        room[chosen] -= tokens[sequence]
        load[chosen] = soonest
        count[chosen] += 1
    if (
        not _widen(ranks, num_groups, group_of, rounds_of, first_rank, size, count, load)
        or count.max() > most_sequences
    ):
        return none
    longest = np.zeros(rounds, np.int64)
    for group in range(num_groups):
        longest[rounds_of[group]] = max(longest[rounds_of[group]], load[group])
    return max(int(longest.sum()), 1), group_of, rounds_of, first_rank, size


@compiled
def _share_of_round(work: Int64Array, ranks: int, rounds: int) -> int:
    """Work of each rank in a round, besides sequences that outlast one on all ranks and have a round to themselves."""
    left, others = work.sum(), rounds
    for each in work:  # dearest first
        if others == 1 or each * others <= left:
            break
        left -= each
        others -= 1
    return int(left) // ranks // others


@compiled
def _sizes_wanted(tokens: Int64Array, work: Int64Array, sizes: Int64Array, cap: int, longest: int) -> Int64Array:
    """The index in `sizes` of the fewest ranks that have room for each sequence [n] and are done within `longest`."""
    wanted = np.empty(tokens.size, np.int64)
    for sequence in range(tokens.size):
        index = 0
        while index < sizes.size - 1 and (
            sizes[index] * cap < tokens[sequence] or work[sequence] > longest * sizes[index]
        ):
            index += 1
        wanted[sequence] = index
    return wanted


@compiled
def _widen(
    ranks: int,
    num_groups: int,
    group_of: Int64Array,
    rounds_of: Int64Array,
    first_rank: Int64Array,
    size: Int64Array,
    count: Int64Array,
    load: Int64Array,
) -> bool:
    """Merge each group without a sequence with those beside it, until none is; False where a round has none at all."""
    for empty in range(num_groups):
        while size[empty] > 0 and count[empty] == 0:
            if size[empty] == ranks:
                return False
            parent = 2 * size[empty]
            first = first_rank[empty] // parent * parent
            if first + parent > ranks:
                first, parent = 0, ranks
            total, members = np.int64(0), np.int64(0)
            for group in range(num_groups):
                is_inside = first <= first_rank[group] < first + parent and size[group] <= parent
                if group != empty and rounds_of[group] == rounds_of[empty] and size[group] > 0 and is_inside:
                    total += load[group] * size[group]
                    members += count[group]
                    for sequence in range(group_of.size):
                        if group_of[sequence] == group:
                            group_of[sequence] = empty
                    size[group] = count[group] = load[group] = 0
            first_rank[empty], size[empty] = first, parent
            count[empty], load[empty] = members, total // parent
    return True
