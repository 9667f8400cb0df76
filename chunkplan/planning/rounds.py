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
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import whole_pairs, work_ns
from chunkplan.cost.model import CostModel
from chunkplan.planning.sharing import shared_times

#: How long a round may be, in parts of what it would be were all ranks busy all of the time; each is tried.
_SHARES = (1.0, 1.04, 1.1, 1.2, 1.35, 1.5, 1.7, 1.9, 2.1, 2.4, 2.7, 3.0, 3.5)

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
    round_time: int = 0,
    stages: int = 1,
) -> list[list[list[int]]] | None:
    """The places of the sequences of each rank in each round, `[rounds][ranks]` lists; None where none were found.

    Args:
        tokens: of each sequence, int64 [n]; a group of s ranks takes at most `s * cap` in a round.
        work: of each sequence alone on a rank, int64 [n], of which a group of s ranks is done s times as fast; or the
            time of each on every size of a group, [num_sizes, n] (`group_times`).
        ranks: how many there are.
        cap: most tokens of a rank in a round.
        multiple: the number of rounds is a multiple of it.
        least_size: ranks of a group at least, a power of two.
        most_sequences: sequences of a group in a round at most.
        round_time: of a micro-batch, beside its sequences.
        stages: of the pipeline of each rank, which takes the longest round once more for each but the first.
    """
    sizes = group_sizes(ranks, least_size)
    times = work // sizes[:, None] if work.ndim == 1 else work  # [num_sizes, n]
    order = np.argsort(-times[0], kind="stable")
    times, tokens = times[:, order], tokens[order]
    fewest = max(-(-int(tokens.sum()) // (ranks * cap)), 1)
    first = -(-fewest // multiple) * multiple
    limit = most_sequences or tokens.size
    found = None
    share = times[0] * sizes[0] // ranks
    enough = (int(share.sum()) + first * round_time) * (_ENOUGH + 1) // _ENOUGH if stages == 1 else 0
    for tried, rounds in enumerate(range(first, first + _MOST_TRIED * multiple, multiple)):
        for part in _SHARES:
            if found is not None and (found[0] <= enough or tried >= _TRIED):
                break
            too_small = (sizes[:, None] * cap < tokens) | (times > part * even_rounds(share.sum(), share, rounds))
            too_small[-1] = False
            trial = _try_rounds(tokens, times, ranks, sizes, cap, rounds, too_small.argmin(axis=0), limit)
            value = int(trial[0].sum() + (stages - 1) * trial[0].max()) + (rounds + stages - 1) * round_time
            if trial[0][0] > 0 and (found is None or value < found[0]):
                found = value, trial
    if found is None:
        return None
    _, (_, group_of, rounds_of, first_rank, size) = found
    plan: list[list[list[int]]] = [[[] for _ in range(ranks)] for _ in range(int(rounds_of.max()) + 1)]
    for place, group in sorted(zip(order.tolist(), group_of.tolist(), strict=True)):
        for rank in range(first_rank[group], first_rank[group] + size[group]):
            plan[rounds_of[group]][rank].append(place)
    return plan


def group_sizes(ranks: int, least_size: int = 1) -> Int64Array:
    """The numbers of ranks that a group may have, ascending."""
    return np.array([size for size in 2 ** np.arange(ranks.bit_length()) if least_size <= size < ranks] + [ranks])


def group_times(cost: CostModel, tokens: Int64Array, sizes: Int64Array) -> Int64Array:
    """The time of sequences of `tokens` [n] on groups of `sizes` ranks, with what these exchange: ns [num_sizes, n]."""
    work = work_ns(cost, tokens, whole_pairs(cost, tokens))
    times = work // sizes[:, None]
    config = PlanConfig(chunk_size=int(tokens.max()), k=1, dp=1, global_batch=1)
    for index in np.flatnonzero(sizes > 1):
        shared = shared_times(tokens, int(sizes[index]), config, cost)[0] - cost.chunk_ns
        times[index] = np.where(shared < work, np.maximum(shared, times[index]), times[index])
    return times


@compiled
def _try_rounds(
    tokens: Int64Array,
    times: Int64Array,
    ranks: int,
    sizes: Int64Array,
    cap: int,
    rounds: int,
    wanted: Int64Array,
    most_sequences: int,
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array]:
    """Rounds of sequences that descend by work [n]: (time of each, 0 without room; group of each [n]; of each group its
    round, its first rank and its size [groups]). `times`: of each sequence on each of `sizes`, int64 [num_sizes, n];
    `wanted`: the place in `sizes` of those that have a group of their own, 0 of others [n]."""
    n = tokens.size
    group_of = np.full(n, -1, np.int64)
    most = ranks * rounds
    rounds_of, first_rank = np.zeros(most, np.int64), np.zeros(most, np.int64)
    size, room = np.zeros(most, np.int64), np.zeros(most, np.int64)
    count, load = np.zeros(most, np.int64), np.zeros(most, np.int64)
    none = np.zeros(1, np.int64), group_of, rounds_of, first_rank, size

    used = np.zeros(rounds, np.int64)
    num_groups = 0
    for index in range(sizes.size - 1, -1, -1):
        for sequence in range(n if index > 0 else 0):
            if wanted[sequence] != index:
                continue
            target = int(used.argmin())
            while target > 0 and used[target - 1] + sizes[index] <= ranks:
                target -= 1
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
    place = np.searchsorted(sizes, size[:num_groups])  # in `sizes`
    for sequence in range(n):
        group = group_of[sequence]
        if group >= 0:
            room[group] -= tokens[sequence]
            load[group] += times[place[group], sequence]
            count[group] += 1
    until = np.zeros(rounds, np.int64)  # how long each round is wanted to last
    for group in range(num_groups):
        until[rounds_of[group]] = max(until[rounds_of[group]], load[group])
    total = (load * size).sum() + (times[0] * sizes[0] * (group_of < 0)).sum()
    until = np.maximum(until, even_rounds(total // ranks, -np.sort(-until), rounds))
    for sequence in range(n):
        if group_of[sequence] >= 0:
            continue
        chosen, latest = -1, np.int64(0)
        for group in range(num_groups):
            late = load[group] + times[place[group], sequence] - until[rounds_of[group]]
            if room[group] >= tokens[sequence] and count[group] < most_sequences and (chosen < 0 or late < latest):
                chosen, latest = group, late
        if chosen < 0:
            return none
        group_of[sequence] = chosen
        room[chosen] -= tokens[sequence]
        load[chosen] += times[place[chosen], sequence]
        count[chosen] += 1
    if (
        not _widen(ranks, num_groups, group_of, rounds_of, first_rank, size, count, load)
        or count.max() > most_sequences
    ):
        return none
    until[:] = 1
    for group in range(num_groups):
        until[rounds_of[group]] = max(until[rounds_of[group]], load[group])
    return until, group_of, rounds_of, first_rank, size


@compiled
def even_rounds(total: int, longest: Int64Array, rounds: int) -> int:
    """The time of each round, of `total`, beside those that last longer than that: `longest`, which descends."""
    for each in longest:
        if rounds == 1 or each <= total // rounds:
            break
        total = max(total - each, 0)
        rounds -= 1
    return total // rounds


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
